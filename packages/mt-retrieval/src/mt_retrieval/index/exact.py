"""Exact search with NumPy: every inner product is computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_retrieval.embeddings.manifest import Source
from mt_retrieval.embeddings.reader import Embeddings
from mt_retrieval.index.search import SearchResult

BLOCK_ROWS = 16384
"""Passages whose scores are in memory at a time."""


class ExactIndex:
    """matrices: [rows, dim] each, of any floating-point dtype; one after the other the rows of the evidence."""

    kind = "exact"

    def __init__(self, matrices: Sequence[NDArray[np.floating]], source: Source | None = None) -> None:
        self.matrices, self.source = list(matrices), source

    @classmethod
    def of_embeddings(cls, folder: Path) -> ExactIndex:
        embeddings = Embeddings(folder)
        return cls(list(embeddings.shards()), embeddings.manifest.job.source)

    @classmethod
    def of_file(cls, path: Path) -> ExactIndex:
        """A matrix in NumPy's format, of any origin."""
        return cls([read_matrix(path)])

    def __len__(self) -> int:
        return sum(map(len, self.matrices))

    @property
    def dim(self) -> int:
        return int(self.matrices[0].shape[1])

    def search(self, questions: NDArray[np.float32], k: int) -> SearchResult:
        best = SearchResult(np.zeros((len(questions), 0), np.float32), np.zeros((len(questions), 0), np.int64))
        first = 0
        for matrix in self.matrices:
            for start in range(0, len(matrix), BLOCK_ROWS):
                # Read from the memory map and converted a block at a time: memory is BLOCK_ROWS x (dim + questions)
                # numbers, whatever the evidence.
                block = matrix[start : start + BLOCK_ROWS].astype(np.float32)
                best = _merged(best, _best_of_block(self.scores(questions, block), k, first + start), k)
            first += len(matrix)
        return best

    def scores(self, questions: NDArray[np.float32], block: NDArray[np.float32]) -> NDArray[np.float32]:
        """[questions, rows of the block], higher for what is nearer."""
        return questions @ block.T


class ExactL2Index(ExactIndex):
    """By distance: a score is the question's squared norm less the squared distance."""

    kind = "exact, L2"

    def scores(self, questions: NDArray[np.float32], block: NDArray[np.float32]) -> NDArray[np.float32]:
        # Since |q|^2 - |q - b|^2 = 2 q.b - |b|^2; |q|^2 is the same for all rows, so that the order is that of the
        # distances.
        scores: NDArray[np.float32] = questions @ block.T
        scores *= 2
        scores -= np.square(block).sum(1)
        return scores


def read_matrix(path: Path) -> NDArray[np.floating]:
    """Mapped into memory. Raises DataError for a file that is no matrix of numbers in NumPy's format."""
    try:
        matrix = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} is no array in NumPy's format: {error}") from error
    if matrix.ndim != 2 or matrix.dtype.kind != "f":
        raise DataError(f"{path} holds {matrix.dtype} of shape {list(matrix.shape)}; embeddings are a matrix of floats")
    return matrix


def _best_of_block(scores: NDArray[np.float32], k: int, first: int) -> SearchResult:
    """The k best in any order, of scores [questions, rows from `first`]. Which of several with the k-th score are kept
    is not defined."""
    count = scores.shape[1]
    if count <= k:
        return SearchResult(scores, np.broadcast_to(np.arange(first, first + count), scores.shape))
    # Linear in the number of rows; only the k that are left are sorted.
    # Of the negated scores, as NaN is sorted last.
    kept = np.argpartition(-scores, k - 1, axis=1)[:, :k]
    return SearchResult(np.take_along_axis(scores, kept, 1), kept + first)


def _merged(a: SearchResult, b: SearchResult, k: int) -> SearchResult:
    """The k best of both; of equal scores the lower row first."""
    scores, rows = np.concatenate([a.scores, b.scores], 1), np.concatenate([a.rows, b.rows], 1)
    # The last key is the first to count: scores, then rows.
    order = np.lexsort((rows, -scores), axis=1)[:, :k]
    return SearchResult(np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1))
