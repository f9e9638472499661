"""Tests of the layout tests: each way of breaking the runtime has to show."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from tests.dist.test_layouts import CP2, PP2, SP, TP2, ZERO, config

from mt_core.optim.buckets import Bucket
from mt_core.optim.gradients import GradientSums
from mt_core.parallel import collectives
from mt_core.parallel.context_parallel import zigzag
from mt_core.testing import run_ranks
from mt_core.verify.compare import compare
from mt_core.verify.record import RunRecord, record_run

pytestmark = pytest.mark.dist


def drop_an_all_reduce() -> None:
    collectives._Reduce.forward = staticmethod(lambda ctx, x, axis: x.clone())


def forget_partial_gradients() -> None:
    GradientSums.complete = lambda self, named: None


def count_every_copy() -> None:
    GradientSums.counts = lambda self, name: True


def take_positions_for_consecutive() -> None:
    """Position ids of a shard count from where the rank's half of the sequence would begin."""
    shard = zigzag.shard_sequence

    def wrong(x: torch.Tensor, dim: int, axis) -> torch.Tensor:
        piece = shard(x, dim, axis)
        is_positions = bool((x[0] == torch.arange(x.shape[dim])).all())
        return x.chunk(axis.size, dim)[axis.rank].contiguous() if is_positions and axis.size > 1 else piece

    import mt_core.train.device_batches as device_batches

    device_batches.shard_sequence = wrong


def skip_the_last_reduction() -> None:
    Bucket.start_reduce = lambda self: setattr(self, "_reduced", True)


def stale_weights() -> None:
    Bucket.start_gather = lambda self: None


MUTATIONS: dict[str, tuple[int, tuple[str, ...], Callable[[], None]]] = {
    "an all-reduce of tensor parallelism is dropped": (2, (TP2,), drop_an_all_reduce),
    "partial gradients are not summed": (2, (TP2, SP), forget_partial_gradients),
    "gradients of tied weights are not summed": (2, (PP2,), forget_partial_gradients),
    "the norm counts copies twice": (2, (TP2,), count_every_copy),
    "positions of a shard are wrong": (2, (CP2,), take_positions_for_consecutive),
    "gradients are not summed over samples": (2, (), skip_the_last_reduction),
    "updated weights are not collected": (2, (ZERO,), stale_weights),
}


def run_mutated(rank: int, world: int, name: str) -> RunRecord | None:
    _, layout, mutate = MUTATIONS[name]
    mutate()
    record = record_run(config(*layout))
    return record if rank == 0 else None


def run_plain(rank: int, world: int) -> RunRecord:
    return record_run(config())


@cache
def plain() -> RunRecord:
    return run_ranks(1, run_plain)[0]


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_runtime_is_found(name) -> None:
    world, _, _ = MUTATIONS[name]
    differences = compare(run_ranks(world, run_mutated, name)[0], plain())
    assert any(difference.too_large for difference in differences)
