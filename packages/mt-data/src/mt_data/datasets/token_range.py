"""A part of the tokens of a token file, where its documents are too few or too short to be divided among splits."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mt_data.datasets.splits import SplitFractions


class TokenFile(Protocol):
    """What is read of an indexed dataset (mt_data.indexed)."""

    @property
    def sequence_lengths(self) -> NDArray[np.int32]: ...

    def read(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...

    def fingerprint(self) -> str: ...


class TokenRange:
    """Tokens begin to end (exclusive) of all sequences of a file one after another; sequences keep their numbers.

    `elements`: the sequences that have a token of it. The first and the last of them are shorter here than in the file.
    """

    def __init__(self, file: TokenFile, begin: int, end: int) -> None:
        self.file, self.begin, self.end = file, begin, end
        # [sequences]: where each ends in the stream of all tokens
        ends = np.cumsum(file.sequence_lengths, dtype=np.int64)
        first = int(np.searchsorted(ends, begin, side="right"))
        last = int(np.searchsorted(ends, end, side="left"))
        self.elements = range(first, max(first, min(last + 1, len(ends)) if end > begin else first))
        self._skipped = begin - (int(ends[first - 1]) if first else 0)

    @cached_property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """int32 [sequences of the file]: tokens of each within the range."""
        lengths = self.file.sequence_lengths
        ends = np.cumsum(lengths, dtype=np.int64)
        return np.maximum(np.minimum(ends, self.end) - np.maximum(ends - lengths, self.begin), 0).astype(np.int32)

    def read(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        skipped = self._skipped if index == self.elements.start else 0
        if length is None:
            length = int(self.sequence_lengths[index]) - offset
        return self.file.read(index, skipped + offset, length)

    def fingerprint(self) -> str:
        return f"{self.file.fingerprint()}[{self.begin}:{self.end}]"


def range_of_split(file: TokenFile, fractions: SplitFractions, split: str) -> TokenRange:
    """The tokens of a split, by its share of all tokens."""
    total = int(file.sequence_lengths.sum(dtype=np.int64))
    tokens = fractions.range_of(split, total)  # type: ignore[arg-type]
    return TokenRange(file, tokens.start, tokens.stop)


def divides_documents(file: TokenFile, fractions: SplitFractions, shortest: int) -> bool:
    """Whether training and validation, where they have a share, get `shortest` tokens each if documents are divided;
    also true of a file that has no more than that."""
    lengths = file.sequence_lengths
    if int(lengths.sum(dtype=np.int64)) <= shortest:
        return True
    wanted = [split for split in ("train", "valid") if not fractions.is_zero(split)]
    parts = [fractions.range_of(split, len(lengths)) for split in wanted]  # type: ignore[arg-type]
    return all(int(lengths[part.start : part.stop].sum(dtype=np.int64)) >= shortest for part in parts)
