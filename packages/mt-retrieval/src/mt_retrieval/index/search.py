"""`Index`: search by inner product, exact or of faiss."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mt_retrieval.embeddings.manifest import Source


class SearchResult(NamedTuple):
    """scores fp32, rows (of the evidence) int64: [questions, k], the best first; the row -1 where fewer are found."""

    scores: NDArray[np.float32]
    rows: NDArray[np.int64]


class Index(Protocol):
    """source: what is indexed; None where a file does not say it."""

    kind: str
    source: Source | None

    def __len__(self) -> int: ...

    @property
    def dim(self) -> int: ...

    def search(self, questions: NDArray[np.float32], k: int) -> SearchResult:
        """questions: [questions, dim]"""
        ...
