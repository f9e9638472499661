"""`mt verify layout` finds what a broken runtime computes: each fault is put into the ranks of the layout, and not into
the one process that they are compared with."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mt_core.config.schema import Config
from mt_core.nn.dropout import SAMPLE, DropoutStreams
from mt_core.nn.layout import stream_seed
from mt_core.optim.buckets import Bucket
from mt_core.optim.param_and_grad_buffer import ParamAndGradBuffer
from mt_core.train import predictions
from mt_core.train.state import TrainState
from mt_core.train.step import optimizer_step
from mt_core.train.step.optimizer_step import OptimizerStep
from mt_moe.routing import balance
from mt_tools.verify import run_record
from mt_tools.verify.run_record import RunRecord

pytestmark = pytest.mark.dist

DROPOUT = ("--dropout", "0.2")
MOE = (
    "model.moe={num_experts = 4, moe_router_topk = 2, moe_router_load_balancing_type = ['global_aux_loss'], "
    "moe_aux_loss_coeff = [0.1]}"
)
SHARDED = ("parallel.use_distributed_optimizer=true", "parallel.overlap_param_gather=true")


def gathers_are_not_waited_for() -> None:
    Bucket.finish_gather = lambda self: None  # type: ignore[method-assign]


def micro_batches_of_the_first_step() -> None:
    expect, first = ParamAndGradBuffer.expect, []

    def frozen(self: ParamAndGradBuffer, passes: int) -> None:
        first.append(passes)
        expect(self, first[0])

    ParamAndGradBuffer.expect = frozen  # type: ignore[method-assign]


def gradients_are_zeroed_three_times() -> None:
    zero_grad, calls = ParamAndGradBuffer.zero_grad, []

    def forgetful(self: ParamAndGradBuffer) -> None:
        calls.append(self)
        if len(calls) <= 3:
            zero_grad(self)

    ParamAndGradBuffer.zero_grad = forgetful  # type: ignore[method-assign]


def one_stream_for_all_samples() -> None:
    DropoutStreams.begin = lambda self, site: torch.manual_seed(stream_seed(self.seed, site))  # type: ignore


def a_stream_for_each_rank() -> None:
    DropoutStreams.begin = lambda self, site: torch.manual_seed(  # type: ignore
        stream_seed(self.seed, f"{site} at sample {SAMPLE.get()} of rank {dist.get_rank()}")
    )


def mean_of_the_ranks_means() -> None:
    """Each rank divides by its own number of tokens, and by the number of ranks."""
    OptimizerStep.global_counts = lambda self, counts: (  # type: ignore[method-assign]
        counts.divisor * self.ctx.dp.size,
        counts.tokens,
    )


def samples_of_this_rank_alone() -> None:
    def count(self: TrainState, name: str, value: int) -> None:
        before = self.__dict__.get(name, 0)
        if name == "consumed_samples" and value > before:
            value = before + (value - before) // 2
        object.__setattr__(self, name, value)

    TrainState.__setattr__ = count  # type: ignore[method-assign, assignment]


def evaluation_of_this_rank_alone() -> None:
    predictions.sum_over = lambda values, axis, device: list(values)  # type: ignore[assignment]


def auxiliary_losses_of_this_rank_alone() -> None:
    take, sum_on_device = optimizer_step.AuxiliaryMeans.take, optimizer_step.sum_on_device

    def take_alone(means: Any, passes: int) -> list[torch.Tensor]:
        # The loss of the step is summed by the same function, and stays.
        optimizer_step.sum_on_device = lambda value, axis: value  # type: ignore[assignment]
        try:
            return take(means, passes)
        finally:
            optimizer_step.sum_on_device = sum_on_device

    optimizer_step.AuxiliaryMeans.take = take_alone  # type: ignore[method-assign]


def global_loss_of_this_rank_alone() -> None:
    balance.all_reduce = lambda value, axis: value.clone()  # type: ignore[assignment]


FAULTS: dict[str, tuple[Callable[[], None], tuple[str, ...], tuple[str, ...], str]] = {
    "updated weights are not waited for": (gathers_are_not_waited_for, SHARDED, (), "loss of step 3"),
    "micro-batches of the first step": (
        micro_batches_of_the_first_step,
        (),
        (),
        # A reduction that starts a micro-batch early races with the gradients that are still added to what it sends.
        "gradient norm of step 2|loss of step 3",
    ),
    "gradients are not zeroed": (gradients_are_zeroed_three_times, (), (), "gradient norm of step 4"),
    "one dropout stream for all samples": (one_stream_for_all_samples, (), DROPOUT, "loss of step 1"),
    "dropout by rank": (a_stream_for_each_rank, (), DROPOUT, "(loss|gradient norm) of step 1"),
    "mean of means": (mean_of_the_ranks_means, (), (), "loss of step 1"),
    "mean of means in bf16": (mean_of_the_ranks_means, (), ("--dtype", "bf16"), "loss of step 1"),
    "auxiliary losses are not averaged": (
        auxiliary_losses_of_this_rank_alone,
        (MOE,),
        (),
        r"auxiliary loss moe/layer_0/\w+ of step 1",
    ),
    "the global balance loss counts one rank": (
        global_loss_of_this_rank_alone,
        (MOE,),
        (),
        "gradient norm of step 1|loss of step 2|auxiliary loss .* of step 1",
    ),
    "consumed samples are counted locally": (samples_of_this_rank_alone, (), (), "consumed samples of step 1"),
    "evaluation is not summed": (evaluation_of_this_rank_alone, (), (), "evaluation number 1"),
}
"""Name -> the fault, keys that turn on what it breaks, options of the command, the first difference that it makes
(a regular expression)."""

RECORD_ON_RANK = run_record.record_on_rank


def record_with_fault(
    rank: int, world: int, tree: Mapping[str, Mapping[str, Any]], steps: int, run_dir: Path | None, *, name: str
) -> RunRecord | None:
    if world > 1:
        FAULTS[name][0]()
    return RECORD_ON_RANK(rank, world, tree, steps, run_dir)


RECORD = run_record.record
REFERENCES: dict[str, RunRecord] = {}


@pytest.fixture(autouse=True)
def one_process_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations without a fault are trained in one process once for all tests."""

    def record(config: Config, *, world: int | None = None, steps: int = 0) -> RunRecord:
        key = f"{config.to_dict()} {steps}"
        if world != 1:
            return RECORD(config, steps=steps)
        if key not in REFERENCES:
            REFERENCES[key] = RECORD(config, world=1, steps=steps)
        return REFERENCES[key]

    monkeypatch.setattr(run_record, "record", record)


CONFIG = """
preset = "gpt-tiny"
[train]
train_iters = 20
"""


def verify(mt: Any, folder: Path, keys: tuple[str, ...], options: tuple[str, ...]) -> Any:
    (folder / "run.toml").write_text(CONFIG)
    settings = [word for key in keys for word in ("--set", key)]
    return mt("verify", "layout", folder / "run.toml", *settings, *options)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_data_parallelism_is_found(mt, tmp_path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _, keys, options, first = FAULTS[name]
    monkeypatch.setattr(run_record, "record_on_rank", partial(record_with_fault, name=name))
    outcome = verify(mt, tmp_path, keys, options)
    assert outcome.code == 1, outcome.out + outcome.err
    assert re.search(f"the first: ({first}):", outcome.out.splitlines()[-1]), outcome.out


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "options"), [((), DROPOUT), (SHARDED, ("--steps", "3"))])
def test_plain_data_parallelism_is_two_processes_that_do_as_one(mt, tmp_path, keys, options) -> None:
    outcome = verify(mt, tmp_path, keys, options)
    assert outcome.code == 0, outcome.out + outcome.err
    against = [line for line in outcome.out.splitlines() if "process" in line]
    assert [line.split()[:2] for line in against][-2:] == [["2", "processes,"], ["against", "1"]]
    assert outcome.out.rstrip().endswith("the same")
