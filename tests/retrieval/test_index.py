"""Exact search against a plain product, faiss against exact search, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.retrieval.conftest import Trained, training_config

from mt_core.errors import ConfigError, DataError, MtError
from mt_core.train import Trainer
from mt_retrieval import index
from mt_retrieval.embeddings import Embeddings
from mt_retrieval.index import INDEX_FILE, ExactIndex, build_index, factory_of, open_index
from mt_retrieval.retriever import Retriever


@pytest.mark.parametrize("k", [1, 7, 60])
def test_exact_search_is_a_sorted_product(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """Over matrices that are cut into blocks in the middle; of equal scores the lower row comes first."""
    monkeypatch.setattr(index, "BLOCK_ROWS", 8)
    random = np.random.default_rng(1)
    rows = random.integers(-3, 4, (50, 5)).astype(np.float16)
    questions = random.integers(-3, 4, (4, 5)).astype(np.float32)
    scores, found = ExactIndex([rows[:19], rows[19:]]).search(questions, k)
    for question, best, numbers in zip(questions, scores, found, strict=True):
        products = [float(np.dot(question, row.astype(np.float32))) for row in rows]
        expected = sorted(range(50), key=lambda row: (-products[row], row))[:k]
        assert best.tolist() == [products[row] for row in expected]
        assert k == 1 or len(set(numbers.tolist())) == len(expected)
        assert [products[row] for row in numbers] == [products[row] for row in expected]
        assert numbers.tolist() == sorted(numbers.tolist(), key=lambda row: (-products[row], row))


@pytest.fixture(scope="module")
def questions(trained: Trained) -> np.ndarray:
    texts = (trained.world.folder / "questions.tsv").read_text().splitlines()
    return Retriever.open(trained.embeddings, device="cpu").encoder.questions([text.split("\t")[0] for text in texts])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "parameters", "share"),
    [("flat", None, 1.0), ("ivf", "nprobe=6", 1.0), ("hnsw", "efSearch=64", 0.95), ("pq", None, 0.4)],
)
def test_faiss_finds_what_exact_search_finds(trained, questions, tmp_path: Path, kind, parameters, share) -> None:
    pytest.importorskip("faiss")
    embeddings = Embeddings(trained.embeddings)
    lists = 6 if kind == "ivf" else None
    factory = factory_of(kind, len(embeddings), embeddings.dim, lists, 8 if kind == "pq" else None)
    # Few rows: faiss trains eight bits of a product quantizer on 256 at least.
    build_index(embeddings, tmp_path, factory if kind != "pq" else "PQ8x4", None)
    index, reference = open_index(tmp_path, parameters), open_index(trained.embeddings)
    found, expected = index.search(questions, 5), reference.search(questions, 5)
    if kind in ("flat", "ivf"):
        np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5)
    common = [len(set(a) & set(b)) / 5 for a, b in zip(found.rows.tolist(), expected.rows.tolist(), strict=True)]
    assert np.mean(common) >= share


def test_a_default_index_fits_any_number_of_passages() -> None:
    assert factory_of("ivf", 21_015_324, 768, None, None) == "IVF18337,Flat"
    assert factory_of("ivf", 20, 768, None, None) == "IVF1,Flat"
    assert factory_of("pq", 100, 768, None, None) == "PQ192"
    assert factory_of("pq", 100, 7, None, None) == "PQ1"


def damage(trained: Trained, folder: Path) -> Path:
    build_index(Embeddings(trained.embeddings), folder, "Flat", None)
    with (folder / INDEX_FILE).open("r+b") as file:
        file.write(b"\0\0\0\0")
    return folder


def written(folder: Path, content: bytes) -> Path:
    (folder / "x.npy").write_bytes(content)
    return folder / "x.npy"


def untrained(trained: Trained, folder: Path) -> Path:
    """Another encoder of the same shape."""
    config = training_config(trained.world, "train.train_iters=1", "train.seed=5")
    Trainer(config, run_dir=folder / "run", valid_data={}).train()
    return folder / "run"


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda t, p: open_index(p), DataError, r"is no index: give a folder that mt retrieve embed"),
        (lambda t, p: open_index(t.embeddings, "nprobe=2"), ConfigError, r"searched exactly"),
        (
            lambda t, p: open_index(written(p, b"")),
            DataError,
            r"is no array in NumPy's format: EOF: reading magic string",
        ),
        (lambda t, p: open_index(written(p, b"\x80\x04.")), DataError, r"x.npy is no array in NumPy's format"),
        (lambda t, p: open_index(p / "none.npy"), DataError, r"is no array in NumPy's format: .*No such file"),
        (lambda t, p: open_index(damage(t, p)), DataError, r"index.faiss is damaged: .*run mt retrieve index again"),
        (
            lambda t, p: Retriever.open(t.embeddings, checkpoint=untrained(t, p), device="cpu"),
            ConfigError,
            r"the index is of another encoder: SHA-256 .* give the encoder of the index with --checkpoint",
        ),
        (
            lambda t, p: Retriever.open(t.embeddings, evidence=other_evidence(t, p), device="cpu"),
            ConfigError,
            r"the index is of another evidence: SHA-256 .*with --evidence, or embed the evidence again",
        ),
        (
            lambda t, p: build_index(Embeddings(t.embeddings), p, "PQ5", None),
            ConfigError,
            r"faiss cannot make the index PQ5 of 240 embeddings of width 32",
        ),
        (lambda t, p: factory_of("pq", 9, 32, None, 5), ConfigError, r"--pq-bytes 5 does not divide the width"),
    ],
)
def test_what_does_not_fit_is_refused(trained, tmp_path: Path, call, error: type[MtError], words: str) -> None:
    with pytest.raises(error, match=words):
        call(trained, tmp_path)


def other_evidence(trained: Trained, folder: Path) -> Path:
    path = folder / "other.tsv"
    path.write_text(trained.world.passages.read_text().replace("number 7.", "number 8."))
    return path
