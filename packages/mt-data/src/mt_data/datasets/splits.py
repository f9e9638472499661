"""Which part of a corpus is for training, validation and test.

The rule and its rounding are Megatron's, so that a split given there holds the same documents here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError
from mt_core.interfaces import Split

SPLITS: tuple[Split, ...] = get_args(Split)
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")
_ALLOWED = re.compile(r"[\d.,\s]*")


@dataclass(frozen=True)
class SplitFractions:
    """Book-ends of each split within [0, 1], None for a split of zero width.

    `text` is the split as the user wrote it, for messages.
    """

    text: str
    bounds: tuple[tuple[float, float] | None, ...]

    def is_zero(self, split: Split) -> bool:
        """Whether the split was given no share at all."""
        return self.bounds[SPLITS.index(split)] is None

    def range_of(self, split: Split, count: int) -> range:
        """The elements of `split` among `count`; empty for a split of zero width or one rounded away.

        Both ends are rounded half to even, as Python's `round` does.
        """
        bounds = self.bounds[SPLITS.index(split)]
        if bounds is None:
            return range(0)
        low, high = bounds
        return range(round(low * count), round(high * count))

    def elements(self, split: Split, count: int) -> NDArray[np.int32]:
        """`range_of` as an array [elements of the split]."""
        chosen = self.range_of(split, count)
        return np.arange(chosen.start, chosen.stop, dtype=np.int32)


def parse_split(text: str, key: str = "data.split") -> SplitFractions:
    """Read "969,30,1": shares of train, validation and test; missing ones are 0, the sum is made 1.

    Raises ConfigError for a text without positive numbers or with more than three.
    """
    if not _ALLOWED.fullmatch(text):
        raise ConfigError(f'{key}="{text}" must be numbers separated by commas, such as "969,30,1"')
    numbers = [float(number) for number in _NUMBER.findall(text)]
    if not 1 <= len(numbers) <= len(SPLITS) or sum(numbers) <= 0:
        raise ConfigError(
            f'{key}="{text}" must hold one to three shares (train, validation, test), such as "969,30,1", '
            "of which at least one is positive"
        )
    return SplitFractions(text, _book_ends(numbers))


def _book_ends(shares: Sequence[float]) -> tuple[tuple[float, float] | None, ...]:
    # The same float64 operations in the same order as Megatron's (normalize, then running sum): a book-end that differs
    # in its last bit can round to another document.
    padded = list(shares) + [0.0] * (len(SPLITS) - len(shares))
    total = sum(padded)
    normal = [share / total for share in padded]
    ends = [0.0]
    for share in normal:
        ends.append(ends[-1] + share)
    # The last end is exactly 1, whatever the sum rounded to; a split of zero width has no bounds.
    ends = [min(end, 1.0) for end in ends]
    ends[-1] = 1.0
    return tuple((low, high) if share > 0 else None for share, low, high in zip(normal, ends, ends[1:], strict=False))


WHOLE = SplitFractions("1 (all of it)", ((0.0, 1.0),) * 3)
"""Every split is the whole corpus: for paths that are given for one split each."""


# -- splits of tokens, where documents are too few or too short --------------------------------------


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


# -- order of samples, for a fixed number of items per epoch -----------------------------------------


def epoch_order(items: int, num_samples: int | None, seed: int) -> NDArray[np.int64]:
    """[epochs * items]: the item of each sample; each epoch has every item once, in an order of its own.

    As many whole epochs as give num_samples (None: one). One numpy.random.RandomState(seed) shuffles them
    one after the other, so that a longer order begins with the shorter one.
    """
    epochs = 1 if num_samples is None or items == 0 else max(1, -(-num_samples // items))
    order = np.tile(np.arange(items, dtype=np.int64), epochs)
    # RandomState takes seeds of 32 bits.
    random = np.random.RandomState(seed % 2**32)
    for epoch in range(epochs):
        random.shuffle(order[epoch * items : (epoch + 1) * items])
    return order
