"""Small texts, and Retro projects made of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mt_data.indexed.writer import IndexedDatasetWriter
from mt_data.tokenizers.null import NullConfig, NullTokenizer
from mt_retrieval.retro.build import build_project

EOD = 99
CHUNK, SAMPLE = 4, 16
OPTIONS = {"split": "70,20,10", "chunk_length": CHUNK, "block_documents": 7}
TOKENIZER = {"tokenizer_type": "NullTokenizer", "config": {"vocab_size": EOD + 1}, "vocab_size": EOD + 1}


def write_text(prefix: Path, documents: list[list[int]]) -> str:
    """As mt data preprocess --append-eod does."""
    tokenizer = NullTokenizer(NullConfig(vocab_size=EOD + 1))
    with IndexedDatasetWriter(prefix, dtype=np.uint16) as writer:
        for document in documents:
            writer.add_document(np.array([*document, EOD], np.uint16), [len(document) + 1])
        writer.finish(tokenizer=TOKENIZER | {"fingerprint": tokenizer.fingerprint()})
    return str(prefix)


def random_documents(count: int, seed: int) -> list[list[int]]:
    """Of runs that several documents have."""
    random = np.random.RandomState(seed)
    runs = random.randint(0, EOD, (12, 6))
    return [runs[random.randint(0, 12, random.randint(1, 9))].flatten().tolist() for _ in range(count)]


def build(project: Path, *prefixes: str, index: str = "exact", embedder: str = "hashed-ngrams", **more) -> None:
    options = {"seq_length": SAMPLE, "num_neighbors": 3, "num_neighbors_query": 500, "block_rows": 16} | more
    build_project(project, prefixes, embedder, index=index, device="cpu", database=OPTIONS, **options)


def build_on_rank(rank: int, world: int, project: Path, texts: tuple[str, str], index: str) -> None:
    build(project, *texts, index=index)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class StoppedError(Exception):
    """In place of a kill."""


class StoppingBars:
    """Bars of which the number-th update raises."""

    def __init__(self, number: int) -> None:
        self.left = number

    @contextmanager
    def __call__(self, title: str) -> Iterator:
        def update(done: int, total: int) -> None:
            self.left -= 1
            if not self.left:
                raise StoppedError(title)

        yield update
