"""Several ranks whose loss and norm are read one step later train as ranks do that wait for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.core.train.test_steady_step import TIMED, Spy, spy_on_step, trained
from tests.covering import EXHAUSTIVE
from tests.dist.in_turn import InTurn, called

from mt_core.config.loading import LoadedConfig, load_config
from mt_core.errors import ConfigError, TrainingError
from mt_core.parallel.context import AxisSizes, build_parallel_context
from mt_core.parallel.reductions import any_over
from mt_core.testing import run_ranks
from mt_core.train import Callback, Trainer
from mt_core.train.host_transfer import DelayedAllReduceFlag

pytestmark = pytest.mark.dist

SETTINGS = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "data.seq_length=16",
    "data.corpus_bytes=1000000",
    "data.num_workers=0",
    "data.eod_mask_loss=true",
    "train.micro_batch_size=1",
    "train.global_batch_size=4",
    "train.train_iters=5",
    "train.eval_interval=null",
    "train.eval_iters=1",
    "train.sample_prompt=null",
    "checkpoint.save_interval=null",
    "optimizer.clip_grad=0.5",
    "lr_schedule.lr_warmup_iters=1",
    "logging.progress=none",
]
MULTI_TOKEN = ("model.family=deepseek", "model.mtp_num_layers=1")
BALANCED = (
    "model.moe={num_experts=4, moe_router_topk=2, moe_router_load_balancing_type=['aux_loss'], "
    "moe_aux_loss_coeff=[0.1], moe_router_enable_expert_bias=true, moe_router_score_function='sigmoid'}",
)
TENSOR = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true", "train.global_batch_size=2")
CONTEXT = ("parallel.context_parallel_size=2", "train.global_batch_size=2")
PIPELINE = ("parallel.pipeline_model_parallel_size=2",)
DISTRIBUTED = ("parallel.use_distributed_optimizer=true", "precision.dtype=bf16")
FSDP2 = ("parallel.use_torch_fsdp2=true",)
LAYOUTS = {
    "data": (2, ()),
    "data, 16-bit moments": (2, ("optimizer.exp_avg_dtype=bf16",)),
    "distributed optimizer": (2, DISTRIBUTED),
    "fsdp2": (2, FSDP2),
    "tensor": (2, TENSOR),
    "context": (2, CONTEXT),
    "pipeline": (2, PIPELINE),
    "data, multi-token": (2, MULTI_TOKEN),
    "pipeline, multi-token": (2, (*MULTI_TOKEN, *PIPELINE)),
    "data, balanced experts": (2, BALANCED),
    "tensor x pipeline, balanced experts": (4, (*BALANCED, *TENSOR, *PIPELINE)),
    "data x pipeline": (4, (*PIPELINE, *DISTRIBUTED)),
}

IN_OTHERS = ("tensor", "pipeline", "data, multi-token", "data, balanced experts")
"""Layouts of which each part is in another."""


def config(*more: str) -> LoadedConfig:
    torch.set_num_threads(1)
    return load_config(preset="gpt-tiny", overrides=[*SETTINGS, *more])


def training(deferred: bool, more: tuple[str, ...]) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """The metrics of each step, but for the time it took, and the weights after them."""
    trainer, steps = trained(config(f"train.deferred_metrics={'always' if deferred else 'never'}", *more))
    assert trainer.engine.step.deferred == deferred
    untimed = [{key: value for key, value in step.items() if key not in TIMED} for step in steps]
    return untimed, {name: weights.detach() for name, weights in trainer.engine.weights.named_parameters()}


def late_and_at_once(rank: int, world: int, more: tuple[str, ...]) -> tuple[list[dict], list[dict], list[str]]:
    """Steps reported one step later, steps reported at once, and the weights that differ in a bit."""
    more = ("train.train_iters=3", *more)
    deferred, after_deferred = training(True, more)
    at_once, after = training(False, more)
    return deferred, at_once, [name for name in after if not torch.equal(after[name], after_deferred[name])]


def own_losses(rank: int, world: int, more: tuple[str, ...]) -> set[str]:
    steps, _ = training(True, more)
    return {name for name in steps[-1] if name.startswith(("mtp_", "moe/"))}


def predicted_losses(rank: int, world: int, more: tuple[str, ...]) -> list[float]:
    steps, _ = training(False, more)
    return [step["mtp_1_loss"] for step in steps]


def waits_of_deferred(rank: int, world: int, more: tuple[str, ...]) -> int:
    return spy_on_step(Trainer(config("train.deferred_metrics=always", *more))).waits


def waits_at_once(rank: int, world: int, more: tuple[str, ...]) -> int:
    return spy_on_step(Trainer(config("train.deferred_metrics=never", *more))).waits


BALANCED_PIPELINE = (*BALANCED, *PIPELINE)
PREDICTING_PIPELINE = (*MULTI_TOKEN, *PIPELINE)
DEFERRED = ((), DISTRIBUTED, FSDP2, TENSOR, CONTEXT, PIPELINE, MULTI_TOKEN)

RUNS = InTurn(
    called,
    [
        *((world, (late_and_at_once, more)) for name, (world, more) in LAYOUTS.items() if name not in IN_OTHERS),
        *((2, (waits_of_deferred, more)) for more in DEFERRED),
        (2, (waits_at_once, ())),
        (2, (own_losses, BALANCED_PIPELINE)),
        (1, (predicted_losses, MULTI_TOKEN)),
        (4, (predicted_losses, PREDICTING_PIPELINE)),
    ],
)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=EXHAUSTIVE if name in IN_OTHERS else ()) for name in LAYOUTS]
)
def test_deferred_metrics_are_those_read_at_once_to_the_last_bit(name) -> None:
    world, more = LAYOUTS[name]
    ranks = RUNS.of_ranks(world, (late_and_at_once, more))
    for deferred, at_once, different in ranks:
        assert [step["iteration"] for step in deferred] == [1, 2, 3]
        assert deferred == at_once
        assert deferred == ranks[0][0]
        assert not different


@pytest.mark.slow
def test_every_rank_has_the_losses_of_all_stages() -> None:
    found = RUNS.of_ranks(2, (own_losses, BALANCED_PIPELINE))
    assert found == [{"moe/layer_0/aux_loss", "moe/layer_1/aux_loss"}] * 2


@pytest.mark.slow
def test_the_losses_of_layers_are_those_of_one_process() -> None:
    alone = RUNS.result(1, (predicted_losses, MULTI_TOKEN))
    for losses in RUNS.of_ranks(4, (predicted_losses, PREDICTING_PIPELINE)):
        assert losses == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("more", DEFERRED)
def test_a_steady_step_of_two_ranks_waits_for_nothing(more) -> None:
    assert RUNS.of_ranks(2, (waits_of_deferred, more)) == [0, 0]


def test_a_step_of_two_ranks_whose_metrics_are_read_at_once_waits() -> None:
    assert min(RUNS.of_ranks(2, (waits_at_once, ()))) >= 1


def bad_on_one_rank(rank: int, world: int, run_dir: str) -> tuple[str, bool, bool]:
    """The second batch of the second rank alone is bad."""
    saving = ("train.deferred_metrics=always", "checkpoint.save_interval=2")
    trainer = Trainer(config(*saving), run_dir=run_dir)
    loss_of = trainer.engine.forward_backward.forward_step
    before: dict[str, torch.Tensor] = {}

    def bad(model, batch):
        losses = loss_of(model, batch)
        if trainer.state.iteration != 1:
            return losses
        before.update({name: weights.detach().clone() for name, weights in model.named_parameters()})
        # Of one rank alone: the flag has to reach the other before weights are updated on either.
        return losses * float("inf") if rank == 1 else losses

    trainer.engine.forward_backward.forward_step = bad
    with pytest.raises(TrainingError) as raised:
        trainer.train()
    kept = all(torch.equal(weights, before[name]) for name, weights in trainer.model.named_parameters())
    return str(raised.value), kept, any(Path(run_dir).rglob("*.safetensors"))


@pytest.mark.slow
def test_a_loss_that_is_not_finite_on_one_rank_ends_all_before_anything_is_saved(tmp_path) -> None:
    first, second = run_ranks(2, bad_on_one_rank, str(tmp_path))
    for (words, kept, saved), samples in ((first, "samples 4 to 6"), (second, "samples 5 to 7")):
        assert "loss is not finite at iteration 2" in words
        assert samples in words
        assert kept
        assert not saved


def refused(rank: int, world: int) -> str:
    with pytest.raises(ConfigError) as raised:
        Trainer(config("train.deferred_metrics=always", "logging.trace_schedule=trace.json", *PIPELINE))
    return str(raised.value)


def test_a_step_whose_schedule_is_traced_is_refused() -> None:
    for words in run_ranks(2, refused):
        assert (
            "train.deferred_metrics=always is not possible: logging.trace_schedule=trace.json measures one step"
            in words
        )


class Stops(Callback):
    """Asks the run to end when it hears of the second step, on the second rank alone."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_step_end(self, run, metrics) -> None:
        if self.rank == 1 and metrics["iteration"] == 2:
            run.stop("enough")


def stopped(rank: int, world: int) -> tuple[int, str | None]:
    result = Trainer(config("train.deferred_metrics=always", "train.train_iters=9"), callbacks=[Stops(rank)]).train()
    return result.state.iteration, result.stopped


@pytest.mark.slow
def test_all_ranks_stop_one_step_after_a_request_of_one_of_them() -> None:
    """The second step is heard of when the third was launched; the others hear of the wish with the fourth."""
    assert run_ranks(2, stopped) == [(4, "another rank"), (4, "enough")]


def agreements(rank: int, world: int) -> tuple[list[bool], int, int]:
    """Answers to the second rank's one wish, at the third call; what the last answer waited for, and what it would
    have waited for at once."""
    ctx = build_parallel_context(AxisSizes())
    agreed = DelayedAllReduceFlag(ctx, ctx.world)
    answers = [agreed(rank == 1 and number == 2) for number in range(4)]
    with Spy() as deferred:
        answers.append(agreed(False))
    with Spy() as at_once:
        any_over(False, ctx.world, ctx.device)
    return answers, deferred.waits, at_once.waits


def test_ranks_agree_a_call_late_and_wait_for_nothing() -> None:
    assert run_ranks(2, agreements) == [([False, False, False, True, False], 0, 1)] * 2


def exits(rank: int, world: int) -> int:
    return Trainer(config("train.deferred_metrics=always", "train.exit_iteration=3")).train().state.iteration


def test_an_exit_that_all_ranks_know_of_is_at_its_step() -> None:
    assert run_ranks(2, exits) == [3, 3]
