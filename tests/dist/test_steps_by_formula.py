"""What a step and an evaluation of two ranks compute, against plain torch: samples with different numbers of counted
tokens, dropout of each sample, a batch size that grows, and weights that arrive as late as they may."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.dist.test_layouts import GATHER, SMALL_BUCKETS, ZERO, config, require_equal

from mt_core.testing import run_ranks
from mt_core.train import Callback, Trainer
from mt_tools.verify.run_record import RunRecord, record_run

pytestmark = pytest.mark.dist

LENGTH, SAMPLES, BATCH = 16, 40, 8
RAMP_UP = (
    "train.rampup_batch_size=[2, 2, 6]",
    "train.train_iters=null",
    "train.train_samples=22",
    "lr_schedule.lr_warmup_iters=null",
    "lr_schedule.lr_warmup_samples=2",
)
"""Batches of 2, 4 and 8 samples: 1, 2 and 4 micro-batches on each of two ranks."""


class UnequalSamples:
    """Random tokens; sample k counts 1 + (5 k mod 16) of its 16 positions."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        ids = np.random.default_rng(index).integers(0, 256, LENGTH + 1)
        counted = 1 + 5 * index % LENGTH
        mask = (np.arange(LENGTH) < counted).astype(np.float32)
        return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": mask, "position_ids": np.arange(LENGTH)}

    def describe(self, index: int) -> str:
        return f"sample {index}"


class OneSample(UnequalSamples):
    """The same sample whatever its number."""

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        return super().__getitem__(3)


class Metrics(Callback):
    def __init__(self) -> None:
        self.steps: list[Mapping[str, Any]] = []
        self.evaluations: list[float] = []

    def on_evaluation(self, run: Trainer, metrics: Mapping[str, Any]) -> None:
        self.evaluations.append(metrics["valid_loss"])

    def on_step_end(self, run: Trainer, metrics: Mapping[str, Any]) -> None:
        self.steps.append(metrics)


# -- means over tokens ------------------------------------------------------------------------------------


def mean_loss(model: torch.nn.Module, samples: range) -> torch.Tensor:
    """Of the counted tokens of these samples together."""
    rows = [UnequalSamples()[index] for index in samples]
    batch = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
    logits = model(tokens=batch["tokens"], position_ids=batch["position_ids"])
    losses = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), reduction="none")
    mask = batch["loss_mask"].flatten()
    return (losses * mask).sum() / mask.sum()


def reported_and_expected(rank: int, world: int, more: tuple[str, ...]) -> dict[str, tuple[float, float]]:
    seen, data = Metrics(), UnequalSamples()
    # lr=0: the weights that the formula reads are those of the step.
    keys = ("train.exit_iteration=1", "train.eval_iters=2", "optimizer.lr=0", "optimizer.min_lr=0", *more)
    trainer = Trainer(config(*keys), callbacks=[seen], train_data=data, valid_data={"valid": data})
    trainer.train()
    evaluated = trainer.evaluate()["valid_loss"]
    trainer.model.zero_grad()
    loss = mean_loss(trainer.model, range(BATCH))
    parameters = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    norm = torch.stack([gradient.norm() for gradient in torch.autograd.grad(loss, parameters)]).norm()
    with torch.no_grad():
        valid = mean_loss(trainer.model, range(2 * BATCH))
    return {
        "loss": (seen.steps[0]["loss"], loss.item()),
        "norm": (seen.steps[0]["grad_norm"], norm.item()),
        "evaluation": (evaluated, valid.item()),
    }


@pytest.mark.slow
@pytest.mark.parametrize("deferred_metrics", ["never", "always"])
@pytest.mark.parametrize("world", [1, 2])
def test_every_counted_token_weighs_the_same(world: int, deferred_metrics: str) -> None:
    """Means of the means of micro-batches or of ranks would give tokens of short samples more weight."""
    for found in run_ranks(world, reported_and_expected, (f"train.deferred_metrics={deferred_metrics}",)):
        for name, (reported, expected) in found.items():
            assert reported == pytest.approx(expected, rel=1e-5), name


# -- weights of positions -----------------------------------------------------------------------------------


class WeightedSamples(UnequalSamples):
    """Two documents of unequal lengths in each sample, and weights from 0 to 3, some of them 0."""

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        drawn = np.random.default_rng([7, index])
        weights = drawn.uniform(0, 3, LENGTH) * (drawn.random(LENGTH) < 0.7)
        first = int(drawn.integers(2, LENGTH - 2))
        # The second document of every third sample has no weight at all.
        weights[first:] *= index % 3 > 0
        segments = (np.arange(LENGTH) >= first).astype(np.int64)
        return {**super().__getitem__(index), "loss_mask": weights.astype(np.float32), "segment_ids": segments}


def weighted_loss(model: torch.nn.Module, samples: range, normalization: str, divisor: float) -> torch.Tensor:
    """The sum document by document, as each normalization defines it."""
    total, weights, tokens, documents = torch.zeros(()), 0.0, 0, 0
    for index in samples:
        row = {name: torch.from_numpy(array)[None] for name, array in WeightedSamples()[index].items()}
        logits = model(**{name: row[name] for name in ("tokens", "position_ids", "segment_ids")})
        losses = F.cross_entropy(logits[0].float(), row["labels"][0], reduction="none")
        for document in (0, 1):
            own = row["loss_mask"][0] * (row["segment_ids"][0] == document)
            weights, tokens = weights + own.sum().item(), tokens + int((own > 0).sum())
            if own.sum() > 0:
                documents += 1
                total = total + (losses * own).sum() / (own.sum() if normalization == "sequences" else 1)
    return total / {"weights": weights, "tokens": tokens, "sequences": documents, "constant": divisor}[normalization]


DIVISOR = 50.0
CONSTANT_SETTINGS = ("train.loss_normalization=constant", f"train.loss_divisor={DIVISOR}")
FUSED = "train.loss=linear_cross_entropy_sum"
PP2 = ("parallel.pipeline_model_parallel_size=2", "train.micro_batch_size=2")
WEIGHTED_LAYOUTS = [
    *((normalization, 2, ()) for normalization in ("weights", "tokens", "sequences", "constant")),
    ("sequences", 2, ("parallel.context_parallel_size=2",)),
    ("weights", 2, ("parallel.context_parallel_size=2", FUSED)),
    ("sequences", 2, PP2),
    ("tokens", 2, ("parallel.tensor_model_parallel_size=2", FUSED)),
    ("sequences", 2, (FUSED, "train.micro_batch_size=1")),
    ("weights", 1, ("train.loss=linear_cross_entropy",)),
]


def settings_of(normalization: str) -> tuple[str, ...]:
    return CONSTANT_SETTINGS if normalization == "constant" else (f"train.loss_normalization={normalization}",)


def weighted_run(more: tuple[str, ...]) -> tuple[Trainer, dict[str, float]]:
    seen, data = Metrics(), WeightedSamples()
    keys = (
        *("train.exit_iteration=1", "train.eval_iters=2", "optimizer.lr=0", "optimizer.min_lr=0"),
        *("train.micro_batch_size=2", "data.reset_attention_mask=true"),
    )
    trainer = Trainer(config(*keys, *more), callbacks=[seen], train_data=data, valid_data={"valid": data})
    trainer.train()
    step = seen.steps[0]
    return trainer, {"loss": step["loss"], "norm": step["grad_norm"], "evaluation": trainer.evaluate()["valid_loss"]}


def weighted_by_formula(rank: int, world: int) -> dict[str, dict[str, float]]:
    """Normalization -> what a step and an evaluation have to report."""
    model = weighted_run(())[0].model
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = {}
    for normalization in ("weights", "tokens", "sequences", "constant"):
        loss = weighted_loss(model, range(BATCH), normalization, DIVISOR)
        norm = torch.stack([gradient.norm() for gradient in torch.autograd.grad(loss, parameters)]).norm()
        with torch.no_grad():
            valid = weighted_loss(model, range(2 * BATCH), normalization, 2 * DIVISOR)
        expected[normalization] = {"loss": loss.item(), "norm": norm.item(), "evaluation": valid.item()}
    return expected


def reported_of_weights(rank: int, world: int, more: tuple[str, ...]) -> dict[str, float]:
    return weighted_run(more)[1]


@pytest.mark.slow
def test_weights_of_positions_multiply_losses_in_every_normalization_loss_and_layout() -> None:
    (expected,) = run_ranks(1, weighted_by_formula)
    for normalization, world, layout in WEIGHTED_LAYOUTS:
        for found in run_ranks(world, reported_of_weights, (*settings_of(normalization), *layout)):
            assert found == pytest.approx(expected[normalization], rel=2e-5), (normalization, layout)


# -- dropout ----------------------------------------------------------------------------------------------


def losses_of_one_sample(rank: int, world: int, more: tuple[str, ...]) -> list[float]:
    """Of each micro-batch of two steps; weights do not change."""
    losses: list[float] = []

    def forward_step(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits = model(tokens=batch["tokens"], position_ids=batch["position_ids"])
        found = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
        losses.append(found.sum().item())
        return found

    data = OneSample()
    keys = ("train.exit_iteration=2", "train.eval_iters=0", "optimizer.lr=0", "optimizer.min_lr=0", *more)
    Trainer(config(*keys), forward_step=forward_step, train_data=data, valid_data={}).train()
    return losses


@pytest.mark.slow
def test_every_sample_drops_other_elements() -> None:
    """Two steps of 8 samples that are alike: 16 losses, all different. Without dropout all are the same."""
    alike, dropped = (
        [loss for own in run_ranks(2, losses_of_one_sample, (f"model.hidden_dropout={rate}",)) for loss in own]
        for rate in (0.0, 0.3)
    )
    assert len(alike) == len(dropped) == 2 * BATCH
    assert max(alike) == pytest.approx(min(alike), rel=1e-6)
    assert len({round(loss, 3) for loss in dropped}) == 2 * BATCH


# -- ranks that overlap work with messages -----------------------------------------------------------------


STEPS = 3
"""Of a growing batch, one of each size."""


def run(rank: int, world: int, more: tuple[str, ...]) -> RunRecord | None:
    record = record_run(config(*more), STEPS)
    return record if rank == 0 else None


@cache
def one_process(more: tuple[str, ...]) -> RunRecord:
    record = run_ranks(1, run, more)[0]
    assert record is not None
    return record


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(), (ZERO, SMALL_BUCKETS), ("parallel.use_torch_fsdp2=true",)])
def test_a_growing_batch_is_reduced_after_its_last_micro_batch(layout: tuple[str, ...]) -> None:
    require_equal(run_ranks(2, run, (*RAMP_UP, *layout))[0], one_process(RAMP_UP))


class Late:
    """A collective that does nothing before it is waited for."""

    def __init__(self, start: Any) -> None:
        self.start = start

    def wait(self) -> None:
        # wait() may be called again, and gathers once.
        start, self.start = self.start, lambda: None
        start()


def make_gathers_late() -> list[Late]:
    """From now on gathers of this process are computed when they are waited for. Returns those, as they start."""
    gather, started = dist.all_gather_into_tensor, []

    def late(out: torch.Tensor, own: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        # Blocking gathers (of metrics and checks) are left as they are.
        if not async_op:
            return gather(out, own, group=group)
        started.append(Late(lambda: gather(out, own, group=group)))
        return started[-1]

    dist.all_gather_into_tensor = late
    return started


def with_late_gathers(rank: int, world: int, more: tuple[str, ...]) -> tuple[RunRecord, int]:
    started = make_gathers_late()
    return record_run(config(*more), STEPS), len(started)


@pytest.mark.slow
def test_weights_that_arrive_when_they_are_waited_for_are_in_time() -> None:
    """A layer that did not wait for its weights would compute with those of the step before."""
    found, count = run_ranks(2, with_late_gathers, (ZERO, SMALL_BUCKETS, GATHER))[0]
    assert count > 3, "several buckets in each of three steps"
    require_equal(found, one_process(()))


def evaluations_of_a_table(rank: int, world: int, more: tuple[str, ...]) -> list[float]:
    """The loss of a bigram model, whose table is read without a call of the module that has it."""

    def forward_step(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        table = next(model.parameters())
        logits = F.embedding(batch["tokens"], table) @ table.T
        return F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")

    make_gathers_late()
    seen, data = Metrics(), UnequalSamples()
    keys = (f"train.exit_iteration={STEPS}", "train.eval_interval=1", "optimizer.lr=0.01", *more)
    Trainer(
        config(*keys), callbacks=[seen], forward_step=forward_step, train_data=data, valid_data={"valid": data}
    ).train()
    return seen.evaluations


@pytest.mark.slow
def test_an_evaluation_waits_for_weights_that_no_layer_waits_for() -> None:
    """Right after a step, with the weights of that step, however they are read."""
    alone = run_ranks(1, evaluations_of_a_table, ())[0]
    assert len(set(alone)) >= STEPS
    for found in run_ranks(2, evaluations_of_a_table, (ZERO, SMALL_BUCKETS, GATHER)):
        assert found == pytest.approx(alone, rel=1e-5)
