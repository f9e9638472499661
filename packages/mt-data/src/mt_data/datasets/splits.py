"""Which part of a corpus is for training, validation and test.

The rule and its rounding are Megatron's, so that a split given there holds the same documents here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError
from mt_core.specs import Split

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
