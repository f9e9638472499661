"""Several indexed datasets read as one, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from mt_data.indexed.reader import SequenceReader


class JoinedReader(SequenceReader):
    """The sequences of `readers` in their order, without a copy of their tokens.

    names: what each reader is called in messages.
    """

    def __init__(self, readers: Sequence[SequenceReader], names: Sequence[str]) -> None:
        self.readers, self.names = list(readers), list(names)
        self.prefix = ", ".join(names)
        self.dtype = np.result_type(*(reader.dtype for reader in readers))
        # [readers + 1]: the first sequence of each reader, then the number of all
        self._starts = np.cumsum([0, *map(len, readers)], dtype=np.int64)

    def locate(self, index: int) -> tuple[int, int]:
        """(reader, sequence within it) of sequence `index`, 0 <= index < S."""
        # The last reader that starts at or before it: one without sequences starts where the next one does.
        reader = int(np.searchsorted(self._starts, index, side="right")) - 1
        return reader, index - int(self._starts[reader])

    @cached_property
    def sequence_lengths(self) -> NDArray[np.int32]:
        return np.concatenate([reader.sequence_lengths for reader in self.readers])

    @cached_property
    def document_indices(self) -> NDArray[np.int64]:
        # The end of one reader's documents is the beginning of the next one's.
        parts = [
            reader.document_indices[:-1] + start for reader, start in zip(self.readers, self._starts, strict=False)
        ]
        return np.concatenate([*parts, self._starts[-1:]])

    @property
    def sequence_modes(self) -> None:
        return None

    def manifest(self) -> None:
        return None

    def fingerprint(self) -> str:
        return sha256(" ".join(reader.fingerprint() for reader in self.readers).encode()).hexdigest()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _span(self, index: int) -> tuple[int, int]:
        reader, number = self.locate(index)
        return index, self.readers[reader]._span(number)[1]

    def _view(self, position: int, offset: int, length: int) -> np.ndarray:
        reader, number = self.locate(position)
        return self.readers[reader].get(number, offset, length)

    def _read(self, position: int, offset: int, length: int) -> np.ndarray:
        reader, number = self.locate(position)
        return self.readers[reader].read(number, offset, length)
