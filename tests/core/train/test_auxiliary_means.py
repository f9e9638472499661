"""Auxiliary losses of ranks with other micro-batches: what is reported is the mean over all of them."""

from __future__ import annotations

import pytest
import torch

from mt_core.nn.auxiliary import AuxiliaryLoss
from mt_core.parallel.context import AxisSizes, build_parallel_context
from mt_core.testing import run_ranks
from mt_core.train.step.optimizer_step import AuxiliaryMeans

PASSES = 3


def reported(rank: int, world: int, sizes: dict[str, int]) -> dict[str, float]:
    """Micro-batch m of data-parallel rank r has the loss 1 + 10 r + m, on each pipeline stage under its own name."""
    ctx = build_parallel_context(AxisSizes(**sizes))
    loss = AuxiliaryLoss(f"stage {ctx.pp.rank}")
    means = AuxiliaryMeans([loss], ctx)
    means.begin(PASSES)
    for number in range(PASSES):
        x = torch.zeros(1, requires_grad=True)
        loss(x, torch.tensor(1.0 + 10.0 * ctx.dp.rank + number)).sum().backward()
    return dict(zip(means.names, map(float, means.take(PASSES)), strict=True))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "sizes"), [(1, {}), (2, {}), (2, {"cp": 2}), (2, {"pp": 2}), (4, {"pp": 2})], ids=str
)
def test_the_mean_is_over_all_micro_batches_of_all_ranks(world, sizes) -> None:
    stages = sizes.get("pp", 1)
    copies = world // (stages * sizes.get("cp", 1))
    losses = [1.0 + 10.0 * rank + number for rank in range(copies) for number in range(PASSES)]
    expected = {f"stage {stage}": sum(losses) / len(losses) for stage in range(stages)}
    for found in run_ranks(world, reported, sizes):
        assert found == pytest.approx(expected)
