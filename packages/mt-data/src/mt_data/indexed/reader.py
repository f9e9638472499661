"""What every indexed dataset can do, wherever its bytes lie."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

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
