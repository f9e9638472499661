"""An indexed dataset that lies in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mt_core.errors import DataError
from mt_data.indexed.reader import SequenceReader


class MemoryIndexedDataset(SequenceReader):
    """Tokens [all] of any dtype, cut into sequences of `lengths` [S], behind the reading interface of files.

    document_indices [D]: the first sequence of each document, then S; by default each sequence is a document.
    Raises DataError when the lengths do not add up.
    """

    def __init__(
        self,
        tokens: NDArray[np.generic],
        lengths: ArrayLike,
        document_indices: ArrayLike | None = None,
        *,
        prefix: str = "<memory>",
    ) -> None:
        self.prefix = prefix
        self.dtype = tokens.dtype
        self._tokens = _read_only(tokens)
        self._lengths = _read_only(np.asarray(lengths, np.int32))
        count = len(self._lengths)
        boundaries = np.arange(count + 1) if document_indices is None else document_indices
        self._boundaries = _read_only(np.asarray(boundaries, np.int64))
        self._ends = np.cumsum(self._lengths, dtype=np.int64)
        self._check()

    @classmethod
    def from_sequences(
        cls, sequences: Sequence[ArrayLike], document_indices: ArrayLike | None = None, *, prefix: str = "<memory>"
    ) -> MemoryIndexedDataset:
        """One array or list of ids for each sequence."""
        arrays = [np.asarray(sequence) for sequence in sequences]
        # np.asarray([]) is float64 and would turn the concatenated ids into floats.
        filled = [array for array in arrays if array.size]
        tokens = np.concatenate(filled) if filled else np.zeros(0, np.int32)
        return cls(tokens, [len(array) for array in arrays], document_indices, prefix=prefix)

    def _check(self) -> None:
        total, boundaries = self._lengths.sum(dtype=np.int64), self._boundaries
        if total != len(self._tokens) or np.any(self._lengths < 0):
            raise DataError(f"{self.prefix}: lengths add up to {total} tokens, {len(self._tokens)} were given")
        if not len(boundaries) or boundaries[0] != 0 or boundaries[-1] != len(self) or np.any(np.diff(boundaries) < 0):
            raise DataError(
                f"{self.prefix}: document_indices must go up from 0 to {len(self)}, the number of sequences"
            )

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        return self._lengths

    @property
    def document_indices(self) -> NDArray[np.int64]:
        return self._boundaries

    @property
    def sequence_modes(self) -> None:
        return None

    def manifest(self) -> None:
        return None

    def fingerprint(self) -> str:
        """SHA-256 of dtype, lengths, documents and tokens."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = sha256(self.dtype.str.encode())
        for array in (self._lengths, self._boundaries, self._tokens):
            # The sizes separate the arrays: [1, 2] + [3] and [1] + [2, 3] must not hash alike.
            digest.update(f"{array.size} ".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._lengths)

    def _span(self, index: int) -> tuple[int, int]:
        length = int(self._lengths[index])
        return int(self._ends[index]) - length, length

    def _view(self, position: int, offset: int, length: int) -> np.ndarray:
        return self._tokens[position + offset : position + offset + length]

    def _read(self, position: int, offset: int, length: int) -> np.ndarray:
        return self._view(position, offset, length)


def _read_only(array: np.ndarray) -> np.ndarray:
    # A view, so that the caller's own array stays writable.
    view = array.view()
    view.flags.writeable = False
    return view
