"""`SequenceReader`: what every indexed dataset can do, wherever its bytes lie; and one that lies in memory."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from hashlib import sha256
from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mt_core.errors import DataError
from mt_data.indexed.manifest import Manifest


class SequenceReader(ABC):
    """Sequences of tokens by number, grouped into documents.

    prefix: where they come from. dtype: of the tokens.
    """

    prefix: str
    dtype: np.dtype

    @property
    @abstractmethod
    def sequence_lengths(self) -> NDArray[np.int32]:
        """int32 [S], read-only: tokens of each sequence."""

    @property
    @abstractmethod
    def document_indices(self) -> NDArray[np.int64]:
        """int64 [D], read-only: the first sequence of each document, then S. A document may be empty."""

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    @property
    @abstractmethod
    def sequence_modes(self) -> NDArray[np.int8] | None:
        """int8 [S], read-only: 0 text, 1 image by convention. None unless multimodal."""

    @abstractmethod
    def manifest(self) -> Manifest | None:
        """What the writer recorded beside the data, None when it recorded nothing."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Hexadecimal; the same for the same content, whatever its name and place."""

    @abstractmethod
    def __len__(self) -> int:
        """S, the number of sequences."""

    @abstractmethod
    def _span(self, index: int) -> tuple[int, int]:
        """(position, length in tokens) of a sequence, 0 <= index < S; the position is `_read`'s own affair."""

    @abstractmethod
    def _view(self, position: int, offset: int, length: int) -> np.ndarray:
        """`length` tokens, `offset` tokens after `position`; no copy where there need not be one."""

    @abstractmethod
    def _read(self, position: int, offset: int, length: int) -> np.ndarray:
        """The same in memory that no file backs."""

    def __getitem__(self, index: SupportsIndex) -> np.ndarray:
        """Tokens [length] of one sequence, read-only. Negative numbers count from the end."""
        return self.get(index)

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(self.get, range(len(self)))

    def get(self, index: SupportsIndex, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens [length] of sequence `index` from `offset` on, read-only; all the rest by default.

        A view of the file's map where there is one. Raises IndexError outside of the data set or of the sequence.
        """
        return self._view(*self._place(index, offset, length))

    def read(self, index: SupportsIndex, offset: int = 0, length: int | None = None) -> np.ndarray:
        """The same, never a view of a file's map: whatever happens to the file is an error, or happens too late."""
        return self._read(*self._place(index, offset, length))

    def _place(self, index: SupportsIndex, offset: int, length: int | None) -> tuple[int, int, int]:
        """What `_view` and `_read` take."""
        # The span is checked against the files by the subclass, so that what follows can rely on it.
        position, available = self._span(self._checked(index))
        if length is None:
            length = available - offset
        if offset < 0 or length < 0 or offset + length > available:
            raise IndexError(
                f"tokens {offset} to {offset + length} of sequence {index} of {self.prefix}, which has {available}"
            )
        return position, offset, length

    def _checked(self, index: SupportsIndex) -> int:
        number, count = operator.index(index), len(self)
        if not -count <= number < count:
            raise IndexError(f"sequence {number} of {self.prefix}, which has {count}")
        return number + count if number < 0 else number


# -- datasets in memory ------------------------------------------------------------------------------


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
