"""Checks after each step: finite loss and gradient norm, the first loss after resuming, equal replicas."""

from __future__ import annotations

import math
from pathlib import Path

from mt_core.errors import CheckpointError, TrainingError
from mt_core.specs import Dataset
from mt_core.train.checkpoint.loss_check import ExpectedLoss, RecentLosses
from mt_core.train.engine import Engine, StepRecord
from mt_core.train.faults import first_fault
from mt_core.train.replicas import check_replicas
from mt_core.train.step.optimizer_step import StepOutcome

NAMED_SAMPLES = 4


class StepChecks:
    """resumed_from, expected_loss: of a run that continues from a checkpoint."""

    def __init__(self, engine: Engine, recent_losses: RecentLosses) -> None:
        self.engine, self.recent_losses = engine, recent_losses
        self.resumed_from: Path | None = None
        self.expected_loss: ExpectedLoss | None = None

    def check(self, record: StepRecord, outcome: StepOutcome, train_data: Dataset) -> str | None:
        """A warning for the user, if there is one. Collective where replicas are compared.

        Raises TrainingError when the step is not finite or replicas differ, CheckpointError when the first loss after
        resuming is not the expected one and checkpoint.resume_loss_check=error.
        """
        self._account(record, outcome, train_data)
        warning = self._first_loss_problem(outcome)
        self._verify_replicas_if_due(record.iteration)
        return warning

    def _account(self, record: StepRecord, outcome: StepOutcome, train_data: Dataset) -> None:
        if outcome.updated:
            self.recent_losses.add(outcome.loss)
            return
        self.engine.state.skipped_iterations += 1
        # Overflow is the normal signal of a dynamic loss scale, and an error once the scale cannot shrink further.
        if self.engine.config.precision.dtype != "fp16" or self.engine.scaler.exhausted:
            raise TrainingError(self._not_finite(record, outcome, train_data))

    def _first_loss_problem(self, outcome: StepOutcome) -> str | None:
        # Checked once, in the first step after resuming.
        expected, self.expected_loss = self.expected_loss, None
        problem = expected.problem(outcome.loss) if expected is not None and outcome.updated else None
        if problem is None:
            return None
        if self.engine.config.checkpoint.resume_loss_check == "error":
            cure = "If the change is meant, add --set checkpoint.resume_loss_check=warn"
            raise CheckpointError(f"{self.resumed_from}: {problem}. Nothing has been saved since. {cure}")
        return f"warning: {problem}"

    def _verify_replicas_if_due(self, iteration: int) -> None:
        interval = self.engine.config.train.verify_replicas_interval
        if interval and iteration % interval == 0:
            # The hashes read weights that an overlapped gather may still write.
            self.engine.weights.finish_gather()
            weights = {name: parameter.detach() for name, parameter in self.engine.model.named_parameters()}
            check_replicas(weights, self.engine.layouts, self.engine.ctx)

    def _not_finite(self, record: StepRecord, outcome: StepOutcome, train_data: Dataset) -> str:
        """The error message: which quantity, at which step, from which samples, and the first faulty module."""
        what = "loss" if not math.isfinite(outcome.loss) else "gradient norm"
        fault = first_fault(self.engine.model, self.engine.ctx)
        samples = [index for group in record.rank_batch.samples for index in group]
        origins = _origins(train_data, samples)
        return (
            f"the {what} is not finite at iteration {record.iteration} (loss {outcome.loss}, gradient norm "
            f"{outcome.grad_norm})"
            + (f"; of what was looked at, {fault} were the first" if fault else "")
            + f". The batch: samples {samples[0]} to {samples[-1]}"
            + (f", from {origins}" if origins else "")
            + ". The last checkpoint is from before this step; lower optimizer.lr, or look at the data"
        )


def _origins(train_data: Dataset, samples: list[int]) -> str:
    """Files and documents of the first samples; empty for a data set that does not describe them."""
    if not hasattr(train_data, "describe"):
        return ""
    named = "; ".join(train_data.describe(index) for index in samples[:NAMED_SAMPLES])
    return named + (f"; and {len(samples) - NAMED_SAMPLES} more" if len(samples) > NAMED_SAMPLES else "")
