"""Batch-size ramp-up: a hand-made table, and what must hold for any."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mt_core.data.training_length import BatchSizeSchedule


def test_the_ramp_of_the_175b_gpt3() -> None:
    """16 16 5859375 to 1536: 95 increments, each for 61,677 samples."""
    schedule = BatchSizeSchedule(1536, 16, 16, 5_859_375)
    assert schedule(0) == 16
    assert schedule(61_676) == 16
    assert schedule(61_678) == 32
    assert schedule(5_859_375) == 1536
    assert schedule(10**9) == 1536


def test_without_a_ramp_it_is_constant() -> None:
    assert {BatchSizeSchedule(8)(consumed) for consumed in (0, 1, 10**6)} == {8}


def test_a_last_short_batch_is_left_out() -> None:
    assert list(BatchSizeSchedule(4).steps(0, 11)) == [(0, 4), (4, 4)]


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 12), st.integers(0, 300), st.integers(0, 300))
def test_steps_follow_one_another_and_never_shrink(start, increment, count, ramp, total) -> None:
    full = start + increment * count
    steps = list(BatchSizeSchedule(full, start, increment, ramp).steps(0, total))
    assert all(a + size == b for (a, size), (b, _) in zip(steps, steps[1:], strict=False))
    sizes = [size for _, size in steps]
    assert sizes == sorted(sizes)
    assert all((size - start) % increment == 0 and size <= full for size in sizes)


@given(st.integers(0, 200))
def test_resuming_gives_the_steps_that_were_left(cut) -> None:
    schedule = BatchSizeSchedule(16, 4, 4, 100)
    steps = list(schedule.steps(0, 400))
    cut = cut % len(steps)
    assert list(schedule.steps(steps[cut][0], 400)) == steps[cut:]
