"""A training step whose forward and backward passes the caller runs.

step = engine.begin_step(micro_batches=2)
for tensors in micro_batches:
    logits = step.forward(tensors)
    step.backward(my_loss(logits, tensors))
outcome = step.finish()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mt_core.config.schema import Config
from mt_core.data.loss_weights import WEIGHTS, LossCounts
from mt_core.errors import ConfigError, TrainingError
from mt_core.nn.model import contract
from mt_core.optim.loss_scale import LossScaler
from mt_core.optim.master_weights import MasterWeights
from mt_core.parallel.context import ParallelContext
from mt_core.train.state import TrainState
from mt_core.train.step.batches import FIRST_SAMPLE, begin_micro_batch
from mt_core.train.step.optimizer_step import OptimizerStep, StepOutcome


class StepParts(Protocol):
    """What a step needs of an Engine."""

    config: Config
    device: torch.device
    ctx: ParallelContext
    model: nn.Module
    weights: MasterWeights
    scaler: LossScaler
    step: OptimizerStep
    state: TrainState

    def next_learning_rate(self) -> float: ...


class SplitStep:
    """One optimizer step on `micro_batches` micro-batches of each data-parallel rank.

    The gradient is the sum over micro-batches and the mean over data-parallel ranks of what `backward` was given, as
    with torch's DistributedDataParallel. Raises ConfigError for layouts in which no process has the whole model and
    whole sequences.
    """

    def __init__(self, engine: StepParts, micro_batches: int) -> None:
        _require_whole(engine)
        self.engine, self.micro_batches = engine, micro_batches
        self._passes = self._rows = 0
        self._tokens = 0.0
        self._loss = torch.zeros((), dtype=torch.float64, device=engine.device)
        engine.step.begin(micro_batches)

    def forward(self, tensors: Mapping[str, Tensor]) -> Any:
        """The model's output for this rank's rows [rows, ...] of a micro-batch, by the fields that the model takes.
        Under tensor parallelism logits are those of this rank's ids."""
        engine, dp = self.engine, self.engine.ctx.dp
        rows = len(next(iter(tensors.values())))
        # Index of the first sample of this micro-batch on this rank: all ranks' rows of the earlier micro-batches, then
        # those of the ranks before.
        first = engine.state.consumed_samples + self._rows * dp.size + dp.rank * rows
        engine.weights.begin_pass(self._passes)
        begin_micro_batch({FIRST_SAMPLE: torch.tensor(first)})
        self._passes, self._rows = self._passes + 1, self._rows + rows
        # Reported only: the caller's loss is not divided by it.
        if WEIGHTS in tensors:
            self._tokens += float(tensors[WEIGHTS].count_nonzero())
        names = [name for name in contract(engine.model).inputs if name in tensors]
        return engine.model(**{name: tensors[name].to(engine.device) for name in names})

    def backward(self, loss: Tensor) -> None:
        """loss: a scalar, computed from the output of the last `forward`."""
        # Gradients are summed over data-parallel ranks, so each gives 1 / size of its loss: the sum is the mean.
        share = loss * (self.engine.scaler.scale / self.engine.ctx.dp.size)
        share.backward()
        self._loss += share.detach()

    def finish(self, learning_rate: float | None = None) -> StepOutcome:
        """Reduce the gradients, clip, update. learning_rate: in place of the schedule's. The outcome's loss is the mean
        over data-parallel ranks of the sum of losses. Raises TrainingError after another number of micro-batches."""
        if self._passes != self.micro_batches:
            raise TrainingError(
                f"this step was begun with micro_batches={self.micro_batches}, and forward was called {self._passes} "
                "times; give begin_step the number of calls"
            )
        return finish_step(self.engine, self._loss, self._rows, self._tokens, learning_rate)


def finish_step(
    engine: StepParts, contribution: Tensor, rows: int, tokens: float, learning_rate: float | None
) -> StepOutcome:
    """Update the weights from the gradients of passes that have run, and advance the counters.

    contribution: this rank's to the scaled loss. rows, tokens: of this data-parallel rank. learning_rate: in place of
    the schedule's.
    """
    rate = engine.next_learning_rate() if learning_rate is None else learning_rate
    _, all_tokens = engine.step.global_counts(LossCounts(tokens=tokens))
    outcome = engine.step.finish(contribution, rate, all_tokens).result()
    engine.state.count(rows * engine.ctx.dp.size, updated=outcome.updated)
    return outcome


def _require_whole(engine: StepParts) -> None:
    parallel, graphs = engine.config.parallel, engine.config.train.cuda_graphs
    reasons = (
        ("parallel.pipeline_model_parallel_size", parallel.pipeline_model_parallel_size, "no process has all layers"),
        ("parallel.context_parallel_size", parallel.context_parallel_size, "no process has whole sequences"),
    )
    for key, size, reason in reasons:
        if size > 1:
            raise ConfigError(
                f"{key}={size}: {reason}, so that forward and backward cannot be called apart; set it to 1, or use "
                "train_step with a loss of your own"
            )
    if graphs != "none":
        raise ConfigError(f"train.cuda_graphs={graphs} captures whole steps; set it to none to call forward apart")
