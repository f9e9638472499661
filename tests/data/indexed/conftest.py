"""Small data sets for the tests of indexed datasets."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from mt_data.indexed import IndexedDatasetWriter

DOCUMENTS = [[[1, 2, 3], [4]], [], [[5, 6], [], [7, 8, 9, 10]]]
"""Three documents of 2, 0 and 3 sequences; 10 tokens."""

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """(name, documents, dtype, **what finish takes) -> prefix of a finished data set."""

    def write(
        name: str = "data",
        documents: Sequence[Sequence[Sequence[int]]] = DOCUMENTS,
        dtype: str = "uint16",
        **finish: object,
    ) -> str:
        prefix = str(tmp_path / name)
        with IndexedDatasetWriter(prefix, np.dtype(dtype)) as writer:
            for document in documents:
                for sequence in document:
                    writer.add_sequence(sequence)
                writer.end_document()
            writer.finish(**finish)  # type: ignore[arg-type]
        return prefix

    return write


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of files that Megatron wrote."""
    if "MT_GOLDEN" not in os.environ:
        pytest.skip("MT_GOLDEN does not name the folder of files that Megatron wrote")
    return Path(os.environ["MT_GOLDEN"]) / "data"
