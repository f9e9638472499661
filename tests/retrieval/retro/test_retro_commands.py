"""`mt retro` as a user types it, through to training; and chunks embedded by a BERT against `transformers`."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
from tests.retrieval.retro.project import CHUNK, EOD, SAMPLE, random_documents, write_text

from mt_cli.main import run
from mt_data.tokenizers.null import NullConfig, NullTokenizer
from mt_retrieval.retro.embeddings import open_embedder

SMALL = {
    "model": {
        "family": "retro",
        "num_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "position_embedding_type": "rope",
        "retro_cross_attention_layers": "[1]",
        "retro_chunk_length": CHUNK,
    },
    "tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": EOD + 1},
    "data": {"dataset_type": "retro", "seq_length": SAMPLE, "retro_chunk_length": CHUNK},
    "train": {"train_iters": 2, "micro_batch_size": 2, "eval_interval": 2, "eval_iters": 1},
    "checkpoint": {"save_interval": "null"},
    "logging": {"progress": "none"},
}


@pytest.mark.slow
def test_from_a_text_to_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix, project = write_text(tmp_path / "text", random_documents(60, 3)), str(tmp_path / "project")
    query = ["retro", "query", project, "--seq-length", str(SAMPLE), "--num-neighbors", "2", "--block-rows", "64"]
    commands = [
        ["retro", "db", "build", project, "--data-path", prefix, "--split", "80,20,0", "--chunk-length", str(CHUNK)],
        ["retro", "index", "train", project, "--embedder", "hashed-ngrams"],
        ["retro", "index", "add", project],
        query,
        ["retro", "verify", project, "--fraction", "0.5"],
    ]
    for command in commands:
        assert run(command) == 0, command
    shown = capsys.readouterr().out
    for words in ("database: ", "index exact: needs no training", "chunks with up to 2", "embeddings: 2 checks passed"):
        assert words in shown
    settings = [f"{section}.{key}={value}" for section, keys in SMALL.items() for key, value in keys.items()]
    training = [part for setting in [*settings, f"data.retro_project_dir={project}"] for part in ("--set", setting)]
    assert run(["train", *training, "--run-dir", str(tmp_path / "run")]) == 0
    assert "valid" in (tmp_path / "run" / "metrics.jsonl").read_text()
    capsys.readouterr()
    assert run([*query[:3], "--num-neighbors", "2"]) != 0
    assert "give --seq-length, the data.seq_length of training" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_chunks_have_the_mean_of_a_berts_states_without_cls_and_sep(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(EOD + 1))]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=len(words), max_position_embeddings=32, **sizes)
    torch.manual_seed(0)
    reference = transformers.BertModel(config).eval()
    reference.save_pretrained(tmp_path)
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    text = NullTokenizer(NullConfig(vocab_size=EOD + 1))
    embedder = open_embedder(str(tmp_path), text, batch_size=2, device="cpu")
    chunks = [[3, 4, 5], [7], [EOD], [*range(40)], [8, EOD, 9]]
    found = embedder.vectors([np.array(chunk) for chunk in chunks], lambda count: None)
    pad, _, cls, sep, _ = range(5)
    for chunk, vector in zip(chunks, found, strict=True):
        inner = [words.index(str(token)) for token in chunk if token != EOD][:30] or [pad]
        with torch.no_grad():
            states = reference(torch.tensor([[cls, *inner, sep]])).last_hidden_state[0]
        np.testing.assert_allclose(vector, states[1:-1].mean(0).numpy(), atol=1e-5)
