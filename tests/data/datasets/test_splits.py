"""Splits: Megatron's rounding, and a partition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_core.errors import ConfigError
from mt_data.datasets.splits import SPLITS, parse_split


def test_book_ends_and_rounding() -> None:
    split = parse_split("969, 30, 1")
    assert split.bounds == ((0.0, 0.969), (0.969, 0.999), (0.999, 1.0))
    assert [split.range_of(name, 1000) for name in SPLITS] == [range(969), range(969, 999), range(999, 1000)]
    assert parse_split("80,15,5").bounds[1] == (0.8, 0.9500000000000001)


def test_half_is_rounded_to_even() -> None:
    split = parse_split("1,1")
    assert [len(split.range_of("train", count)) for count in (1, 3, 5, 7)] == [0, 2, 2, 4]


def test_a_split_without_share_has_no_bounds() -> None:
    split = parse_split("100")
    assert split.bounds == ((0.0, 1.0), None, None)
    assert split.is_zero("valid")
    assert len(split.range_of("test", 10)) == 0
    assert split.elements("train", 3).dtype == np.int32


@given(
    st.lists(st.floats(0, 1000).map(lambda x: round(x, 3)), min_size=1, max_size=3).filter(lambda x: sum(x) > 0),
    st.integers(0, 10**12),
)
def test_splits_are_a_partition(shares: list[float], count: int) -> None:
    split = parse_split(",".join(f"{share:f}" for share in shares))
    ranges = [split.range_of(name, count) for name in SPLITS if not split.is_zero(name)]
    assert ranges[0].start == 0
    assert ranges[-1].stop == count
    assert all(first.stop == second.start for first, second in zip(ranges, ranges[1:], strict=False))


@pytest.mark.parametrize("text", ["", "0,0,0", "1,2,3,4", "train", "1;1"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.split=.*969,30,1"):
        parse_split(text)
