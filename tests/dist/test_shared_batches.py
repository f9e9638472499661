"""Ranks that share a model take the same samples, whether each reads them or the first one sends them."""

from __future__ import annotations

import numpy as np
import pytest

from mt_core.data.loader import BatchReader
from mt_core.parallel.context import AxisSizes, build_parallel_context
from mt_core.testing import run_ranks
from mt_core.train.step.batches import broadcast_batches

pytestmark = pytest.mark.dist

STEPS = [(0, 8), (8, 8), (16, 4)]


class Numbered:
    """Sample k holds k in several dtypes; counts how often it is read."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        self.reads += 1
        return {
            "tokens": np.full(3, index, np.int64),
            "loss_mask": np.full(3, index / 2, np.float32),
            "is_random": np.array(index % 2 == 0),
        }

    def describe(self, index: int) -> str:
        return str(index)


def read(rank: int, world: int, read_by: str) -> tuple[list, int, str]:
    """Everything a rank of TP 2 and DP 2 gets, its reads, and the dtypes."""
    ctx = build_parallel_context(AxisSizes(tp=2))
    dataset = Numbered()
    reader = BatchReader(dataset, STEPS, micro_size=2, dp_rank=ctx.dp.rank, dp_size=ctx.dp.size, workers=1)
    batches = iter(reader)
    if read_by == "first":
        batches = broadcast_batches(batches if ctx.axis("model").rank == 0 else None, ctx.axis("model"))
    got, dtypes = [], ""
    for batch in batches:
        got.append(([{k: v.tolist() for k, v in arrays.items()} for arrays in batch.micro_batches], batch.samples))
        dtypes = " ".join(str(array.dtype) for array in batch.micro_batches[0].values())
    return got, dataset.reads, dtypes


@pytest.mark.slow
def test_both_ways_give_every_rank_of_a_group_the_same() -> None:
    each, first = run_ranks(4, read, "each"), run_ranks(4, read, "first")
    assert [got for got, _, _ in each] == [got for got, _, _ in first]
    assert each[0][0] == each[1][0], "ranks 0 and 1 share a model"
    assert each[0][0] != each[2][0], "ranks 0 and 2 have other samples"
    assert {dtypes for _, _, dtypes in first} == {"int64 float32 bool"}
    assert [reads for _, reads, _ in each] == [10, 10, 10, 10]
    assert [reads for _, reads, _ in first] == [10, 0, 10, 0]
