"""Which samples a step takes, whoever reads them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_core.data.loader import BatchReader, micro_batch_samples


class Numbers:
    """Sample k is [k, k]; remembers which threads read it."""

    def __init__(self, length: int = 1000) -> None:
        self.length = length
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        self.threads.add(threading.current_thread().name)
        return {"tokens": np.array([index, index])}

    def describe(self, index: int) -> str:
        return f"number {index}"


def read(steps, **options) -> list[list[int]]:
    reader = BatchReader(Numbers(), steps, **options)
    return [[int(row[0]) for batch in step.micro_batches for row in batch["tokens"]] for step in reader]


@given(st.integers(0, 50), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(1, 4))
def test_ranks_share_out_a_step_whatever_their_number(first, micro, dp_size, rounds) -> None:
    size = micro * dp_size * rounds
    shares = [micro_batch_samples(first, size, micro, rank, dp_size) for rank in range(dp_size)]
    together = sorted(index for share in shares for group in share for index in group)
    assert together == list(range(first, first + size))
    assert {len(share) for share in shares} == {rounds}


def test_the_order_is_that_of_megatron() -> None:
    """Two ranks, micro-batches of 2, a step of 8: rank 1 has the second pair of each four."""
    assert micro_batch_samples(0, 8, 2, 1, 2) == [range(2, 4), range(6, 8)]


@given(st.integers(1, 24), st.integers(1, 3), st.integers(1, 4))
def test_each_sample_counts_once_on_all_ranks_together(size, micro, dp_size) -> None:
    """Ranks without a sample in the last round read one that does not count: an evaluation may end within a round."""

    class Counted(Numbers):
        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            return {**super().__getitem__(index), "loss_mask": np.ones(2, np.float32)}

    batches = [
        BatchReader(Counted(), [], micro_size=micro, dp_rank=rank, dp_size=dp_size).read(10, size).micro_batches
        for rank in range(dp_size)
    ]
    assert len({len(of_rank) for of_rank in batches}) == 1, "each micro-batch is a collective pass"
    rows = [
        pair for of_rank in batches for one in of_rank for pair in zip(one["tokens"], one["loss_mask"], strict=True)
    ]
    assert sorted(int(tokens[0]) for tokens, mask in rows if mask.any()) == list(range(10, 10 + size))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_reader_threads_change_nothing(workers) -> None:
    steps = [(0, 4), (4, 4), (8, 6)]
    assert read(steps, micro_size=2, workers=workers) == [list(range(4)), list(range(4, 8)), list(range(8, 14))]


def test_workers_read_outside_the_training_thread() -> None:
    dataset = Numbers()
    list(BatchReader(dataset, [(0, 4)], micro_size=2, workers=1))
    assert threading.current_thread().name not in dataset.threads


def test_an_error_in_a_worker_reaches_the_training_loop() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        list(BatchReader(Broken(), [(0, 4)], micro_size=2, workers=2))


def test_it_reads_no_further_ahead_than_configured() -> None:
    dataset = Numbers()
    taken = []

    def steps():
        for first in range(0, 100, 4):
            taken.append(first)
            yield first, 4

    reader = iter(BatchReader(dataset, steps(), micro_size=2, workers=1, ahead=3))
    next(reader)
    assert len(taken) == 3
    reader.close()
