"""Embeddings of passages: their values, shards that do not depend on ranks or kills, and what is refused."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.retrieval.conftest import BATCH, SHARD, Trained, arrays, embed
from tests.retrieval.corpus import PASSAGES, write_passages

from mt_core.errors import ConfigError, DataError
from mt_core.testing import RankFailureError, run_ranks
from mt_retrieval.embedding_writer import embed_evidence
from mt_retrieval.embeddings import Embeddings
from mt_retrieval.encoder import Encoder
from mt_retrieval.evidence import TSVEvidence
from mt_retrieval.index import ExactIndex
from mt_retrieval.retriever import Retriever, evidence_of


@pytest.mark.slow
def test_each_is_the_vector_of_its_passage(trained: Trained) -> None:
    """Embedded one by one, from ids that are put together by hand."""
    embeddings = Embeddings(trained.embeddings)
    found = np.concatenate(list(embeddings.shards()))
    assert found.dtype == np.float16
    ids = [np.load(path) for path in sorted(trained.embeddings.glob("ids-*.npy"))]
    assert np.concatenate(ids).tolist() == list(range(1000, 1000 + PASSAGES))
    encoder = Encoder.load(trained.run, device="cpu")
    encode, special = encoder.tokenizer.encode, encoder.tokenizer.special
    model = encoder._trained.model
    for row in (0, 57, PASSAGES - 1):
        title, text = encode(trained.world.titles[row]), encode(trained.world.texts[row])
        tokens = torch.tensor([[special.cls, *title, special.sep, *text, special.sep]])
        with torch.no_grad():
            expected = model.context_tower.hidden_states(tokens)[0, 0]
        np.testing.assert_allclose(found[row].astype(np.float32), expected.numpy(), rtol=2e-3, atol=2e-2)


def on_rank(
    rank: int, world: int, run: Path, passages: Path, folder: Path, kill_after: int | None = None, tp: int = 1
) -> None:
    encoder = Encoder.load(run, device="cpu", settings={"parallel": {"tensor_model_parallel_size": tp}})

    def on_progress(done: int, total: int) -> None:
        if kill_after is not None and done > kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    evidence = evidence_of(str(passages), encoder)
    embed_evidence(encoder, evidence, folder, shard_rows=SHARD, batch_size=BATCH, on_progress=on_progress)


@pytest.mark.slow
@pytest.mark.dist
def test_killed_and_resumed_by_two_ranks_it_writes_the_same_bytes(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(RankFailureError, match="died"):
        run_ranks(1, on_rank, trained.run, trained.world.passages, tmp_path, SHARD)
    begun = arrays(tmp_path)
    assert 0 < len(begun) < len(arrays(trained.embeddings))
    with pytest.raises(DataError, match="not complete; run the same mt retrieve embed again"):
        Embeddings(tmp_path)
    run_ranks(2, on_rank, trained.run, trained.world.passages, tmp_path)
    assert arrays(tmp_path) == arrays(trained.embeddings)
    assert Embeddings(tmp_path).manifest.made_with["layout"] == {"tp": 1, "dp": 2}


@pytest.mark.slow
@pytest.mark.dist
def test_an_encoder_that_is_divided_gives_the_same_vectors(trained: Trained, tmp_path: Path) -> None:
    run_ranks(2, on_rank, trained.run, trained.world.passages, tmp_path, None, 2)
    divided, whole = (np.concatenate(list(Embeddings(folder).shards())) for folder in (tmp_path, trained.embeddings))
    np.testing.assert_allclose(divided.astype(np.float32), whole.astype(np.float32), rtol=2e-3, atol=1e-2)


def test_a_checkpoint_may_be_removed_while_it_is_embedded(trained: Trained, tmp_path: Path) -> None:
    """As checkpoint.keep_last does while hard negatives are mined from it."""
    shutil.copytree(trained.run, tmp_path / "run")
    encoder = Encoder.load(tmp_path / "run", device="cpu")
    evidence = evidence_of(str(trained.world.passages), encoder)

    def on_progress(done: int, total: int) -> None:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)

    folder = tmp_path / "embeddings"
    embed_evidence(encoder, evidence, folder, shard_rows=SHARD, batch_size=BATCH, on_progress=on_progress)
    found = Retriever(encoder, ExactIndex.of_embeddings(folder), evidence).search([trained.world.texts[3]], 1)
    assert not (tmp_path / "run").exists()
    assert found[0][0].passage.id == 1003


def test_a_damaged_shard_is_found_and_replaced(trained: Trained, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained.embeddings, folder)
    damaged = folder / "embeddings-00001.npy"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(DataError, match=r"embeddings-00001.npy is damaged: its SHA-256 is .* embed again"):
        list(Embeddings(folder).shards())
    embed(trained.run, trained.world.passages, folder)
    assert arrays(folder) == arrays(trained.embeddings)


def test_a_folder_of_another_job_is_refused(trained: Trained, tmp_path: Path) -> None:
    other = tmp_path / "passages.tsv"
    write_passages(other, trained.world.titles[:9], trained.world.texts[:9])
    with pytest.raises(
        ConfigError, match=r"embeddings of another job \(SHA-256 of the evidence: .*count: 240 there, 9 now"
    ):
        embed(trained.run, other, trained.embeddings)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("id\ttext\n1\tone\n", r"line 1: there is no column title; the first line must name id, text and title"),
        ("id\ttext\ttitle\n", r"has no passages behind its first line"),
        ("id\ttext\ttitle\nx\tone\ttwo\n", r"passage 1 has the id 'x', which is no number"),
        (
            f"id\ttext\ttitle\n{2**63}\tone\ttwo\n",
            r"has the id '9223372036854775808', which is no number of at most 18",
        ),
        ("id\ttext\ttitle\n1\tone\n", r"passage 1 has 2 fields, must have id, text, title"),
        ("id\ttext\ttitle\n1\t\udcff\ttwo\n", r"codec can't decode byte"),
    ],
)
def test_files_that_are_no_passages(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "passages.tsv"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=words):
        TSVEvidence(path).passage(0)


def test_compressed_passages_are_refused(tmp_path: Path) -> None:
    """DPR publishes psgs_w100.tsv.gz."""
    path = tmp_path / "passages.tsv.gz"
    path.write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match=r"is compressed, and passages are read at random places; decompress it first"):
        TSVEvidence(path)


def test_quoted_fields_may_have_tabs_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "passages.tsv"
    path.write_text('id\ttext\ttitle\n5\t"a ""b""\tc\nd"\t"t"\n\n6\te\tf\n')
    evidence = TSVEvidence(path)
    found = [(one.id, one.text, one.title) for one in map(evidence.passage, (1, 0))]
    assert found == [(6, "e", "f"), (5, 'a "b"\tc\nd', "t")]
