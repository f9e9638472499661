"""16-bit training over ranks: within rounding of one process, and the same steps left out on every rank."""

from __future__ import annotations

import pytest
import torch
from tests.dist.in_turn import InTurn
from tests.dist.test_layouts import FSDP, PP2, SMALL_BUCKETS, SP, STEPS, TP2, ZERO, config

from mt_core.testing import run_ranks
from mt_tools.verify.run_record import RunRecord, record_run

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SMALL = "train.global_batch_size=4"
BF16, FP16 = "precision.dtype=bf16", "precision.dtype=fp16"
LOSS, NORM, GRADIENT = 1e-4, 3e-3, 0.03
"""Relative bounds for bf16, whose numbers have 8 bits. Measured: at most 1.2e-5, 8.1e-4 and 7.5e-3."""


def run(rank: int, world: int, more: tuple[str, ...]) -> RunRecord | None:
    record = record_run(config(SMALL, BF16, *more), STEPS)
    return record if rank == 0 else None


LAYOUTS = {
    "tp": (2, (TP2,)),
    "tp, sp, zero": (4, (TP2, SP, ZERO, SMALL_BUCKETS)),
    "pp": (2, (PP2,)),
    "zero bubble": (2, (PP2, "parallel.pipeline_schedule=zbv_zero_bubble")),
    "fsdp": (2, (FSDP,)),
    "gradients sent in bf16": (2, (ZERO, "precision.grad_reduce_in_bf16=true")),
}
RUNS = InTurn(run, LAYOUTS.values())


@pytest.fixture(scope="module")
def one_process() -> RunRecord:
    return RUNS.result(1, ())


@pytest.mark.parametrize(("world", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_bf16_is_within_rounding_of_one_process(world, layout, one_process) -> None:
    found = RUNS.result(world, layout)
    assert found.losses == pytest.approx(one_process.losses, rel=LOSS)
    assert found.norms == pytest.approx(one_process.norms, rel=NORM)
    for name, reference in one_process.gradients.items():
        off = (found.gradients[name].float() - reference.float()).norm() / reference.float().norm()
        # The bias of keys has no gradient but rounding.
        assert off < GRADIENT or name.endswith("linear_qkv.bias"), f"{name} differs by {off:.1e}"


def overflowing(rank: int, world: int, more: tuple[str, ...]) -> tuple[list[float], int, float]:
    """Loss scale too large for the first steps: norms, steps left out, and a sum of the weights on this rank."""
    from mt_core.train import Trainer

    trainer = Trainer(config(SMALL, FP16, "precision.initial_loss_scale=4e9", "precision.hysteresis=1", *more))
    trainer.train()
    weights = sum(float(p.detach().double().abs().sum()) for p in trainer.model.parameters())
    return [trainer.engine.scaler.scale], trainer.state.skipped_iterations, weights


def test_an_overflow_leaves_out_the_same_steps_on_every_rank() -> None:
    """Only one rank's samples need to overflow for all to skip: what counts is the norm of the whole gradient."""
    ((scale, skipped, _),) = run_ranks(1, overflowing, ())
    assert skipped > 0
    for layout in ((ZERO,), (PP2,)):
        found = run_ranks(2, overflowing, layout)
        assert {(tuple(rank[0]), rank[1]) for rank in found} == {(tuple(scale), skipped)}
    data_parallel = run_ranks(2, overflowing, ())
    assert data_parallel[0] == data_parallel[1]
    assert torch.isfinite(torch.tensor(data_parallel[0][2]))
