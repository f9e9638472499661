"""Tests of the layout tests: each way of breaking the runtime has to show."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.dist.in_turn import InTurn
from tests.dist.test_layouts import (
    CP2,
    EP2,
    MOE,
    PP2,
    SP,
    STEPS,
    TP2,
    ZERO,
    config,
    of_one_process,
    one_process,
    require_equal,
)

from mt_core.nn.context_parallel import zigzag
from mt_core.optim import finalize_grads, param_and_grad_buffer
from mt_core.optim.buckets import Bucket
from mt_core.optim.finalize_grads import GradFinalizer
from mt_core.parallel import collectives
from mt_moe.routing import balance
from mt_moe.routing.balance import AuxLoss, Scored
from mt_tools.verify.comparison import compare
from mt_tools.verify.run_record import RunRecord, record_run

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SMALL = ("model.num_layers=2", "train.global_batch_size=4")
BIASED_MOE = (
    "model.moe={num_experts = 4, moe_router_topk = 2, moe_router_score_function = 'sigmoid', "
    "moe_router_enable_expert_bias = true}"
)


def drop_an_all_reduce(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(collectives._Reduce, "forward", staticmethod(lambda ctx, x, axis: x.clone()))


def forget_partial_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GradFinalizer, "finalize_model_grads", lambda self, named: None)


def count_every_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GradFinalizer, "counts", lambda self, name: True)


def take_positions_for_consecutive(patch: pytest.MonkeyPatch) -> None:
    """Position ids of a shard count from where the rank's half of the sequence would begin."""
    shard = zigzag.shard_sequence

    def wrong(x: torch.Tensor, dim: int, axis) -> torch.Tensor:
        piece = shard(x, dim, axis)
        # The rows 0 1 2 ... are position ids; tokens are sharded rightly, so that the positions alone are wrong.
        is_positions = bool((x[0] == torch.arange(x.shape[dim])).all())
        return x.chunk(axis.size, dim)[axis.rank].contiguous() if is_positions and axis.size > 1 else piece

    patch.setattr("mt_core.train.step.batches.shard_sequence", wrong)


def skip_the_last_reduction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Bucket, "start_reduce", lambda self: setattr(self, "_reduced", True))


def stale_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Bucket, "start_gather", lambda self: None)


def sum_experts_over_the_dense_group(patch: pytest.MonkeyPatch) -> None:
    shards = {**finalize_grads.SHARDS, "edp": finalize_grads.SHARDS["dp_cp"]}
    patch.setattr(finalize_grads, "SHARDS", shards)
    patch.setattr(param_and_grad_buffer, "SHARDS", shards)


def scale_the_balance_loss_by_tp(patch: pytest.MonkeyPatch) -> None:
    value = AuxLoss.forward

    def scaled(self: AuxLoss, scored: Scored) -> torch.Tensor:
        return value(self, scored) * math.prod(axis.size for axis in scored.share.axes)

    patch.setattr(AuxLoss, "forward", scaled)


def count_the_load_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    """The expert bias moves by it."""
    patch.setattr(balance, "all_reduce", lambda x, axis: x)


MUTATIONS: dict[str, tuple[tuple[str, ...], Callable[[pytest.MonkeyPatch], None]]] = {
    "an all-reduce of tensor parallelism is dropped": ((TP2,), drop_an_all_reduce),
    "partial gradients are not summed": ((TP2, SP), forget_partial_gradients),
    "gradients of tied weights are not summed": ((PP2,), forget_partial_gradients),
    "the norm counts copies twice": ((TP2,), count_every_copy),
    "positions of a shard are wrong": ((CP2,), take_positions_for_consecutive),
    "gradients are not summed over samples": ((), skip_the_last_reduction),
    "updated weights are not collected": ((ZERO,), stale_weights),
    "gradients of experts are summed over the dense group": ((MOE, EP2), sum_experts_over_the_dense_group),
    "the balance loss is scaled by tp": ((MOE, TP2), scale_the_balance_loss_by_tp),
    "the expert bias moves by the load of one rank": ((BIASED_MOE,), count_the_load_of_one_rank),
}


UNBROKEN = {"tp": (MOE, TP2), "expert bias": (BIASED_MOE,)}
"""Layouts that only a mutation uses; the others are in the layout tests."""


def run_mutated(rank: int, world: int, name: str) -> RunRecord | None:
    layout, mutate = MUTATIONS[name]
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        return run_small(rank, layout)


def run_unbroken(rank: int, world: int, name: str) -> RunRecord | None:
    return run_small(rank, UNBROKEN[name])


def run_small(rank: int, layout: tuple[str, ...]) -> RunRecord | None:
    record = record_run(config(*SMALL, *layout), STEPS)
    return record if rank == 0 else None


BROKEN = InTurn(run_mutated, [(2, name) for name in MUTATIONS])
WHOLE = InTurn(run_unbroken, [(2, name) for name in UNBROKEN])


def whole_model(layout: tuple[str, ...]) -> RunRecord:
    """The same model in one process."""
    return one_process(of_one_process((*SMALL, *layout)))


@pytest.mark.long
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_runtime_is_found(name) -> None:
    """By the comparison of the layout tests, and by that of `mt verify`."""
    layout, _ = MUTATIONS[name]
    found, reference = BROKEN.result(2, name), whole_model(layout)
    assert len(found.losses) == len(reference.losses)
    with pytest.raises(AssertionError):
        require_equal(found, reference)
    assert any(difference.too_large for difference in compare(found, reference))


@pytest.mark.parametrize("name", UNBROKEN)
def test_unbroken_they_are_equal(name) -> None:
    require_equal(WHOLE.result(2, name), whole_model(UNBROKEN[name]))
