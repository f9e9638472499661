"""A token file as one stream: all sequences one behind the other, in the order of the file."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class TokenSource(Protocol):
    """What is read of an indexed dataset (mt_data.indexed)."""

    @property
    def sequence_lengths(self) -> NDArray[np.int32]: ...

    def read(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...

    def fingerprint(self) -> str: ...


class TokenStream:
    """Tokens by their place in the stream."""

    def __init__(self, source: TokenSource, name: str) -> None:
        self.source = source
        self.name = name
        self.ends: NDArray[np.int64] = np.cumsum(source.sequence_lengths, dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def sequences_at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n] places -> [n] numbers of the sequences that they are in."""
        # side="right" passes empty sequences and takes the one that begins at its predecessor's end.
        return np.searchsorted(self.ends, places, side="right")

    def read(self, start: int, length: int) -> NDArray[np.int64]:
        """Tokens [at most length] from place `start` on; fewer at the end of the stream."""
        stop = min(start + length, len(self))
        if stop <= start:
            return np.zeros(0, np.int64)
        first, last = (int(number) for number in self.sequences_at(np.array([start, stop - 1])))
        parts = []
        for number in range(first, last + 1):
            end = int(self.ends[number])
            begin = end - int(self.source.sequence_lengths[number])
            offset = max(start - begin, 0)
            parts.append(self.source.read(number, offset, min(stop, end) - begin - offset))
        return np.concatenate(parts).astype(np.int64)
