"""Checks after each step (finite loss and gradient norm, first loss after resuming, equal replicas), and the module at
fault."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mt_core.errors import CheckpointError, TrainingError
from mt_core.interfaces import Dataset
from mt_core.nn.auxiliary import ReportsNonFinite
from mt_core.nn.layout import ParameterLayout
from mt_core.optim.finalize_grads import OTHER_AXES
from mt_core.parallel.context import AxisName, ParallelContext
from mt_core.train.engine import Engine, StepRecord
from mt_core.train.step.optimizer_step import StepOutcome

# -- resumed runs: the loss of the first step --------------------------------------------------------
#
# That loss is computed with the weights of the checkpoint, on samples that the stopped run had not seen. It is compared
# with the losses of the last steps before the checkpoint, which the checkpoint stores. The tolerance around their mean
# is six standard deviations plus a tenth of the mean, and at least LEAST. Missing or permuted weights, another
# tokenizer and other data exceed it. The optimizer state is first used after this loss and is not checked.

WINDOW = 32
"""Number of losses that a checkpoint stores, of the last steps."""
# A standard deviation of fewer values says little.
ENOUGH = 8
"""With fewer losses than this no check is made."""
# LEAST: for losses near 0, whose deviations are near 0 too.
DEVIATIONS, SHARE, LEAST = 6.0, 0.1, 0.05

SAME_LOSS_SECTIONS = frozenset(
    {"parallel", "kernels", "numerics", "recompute", "precision", "optimizer", "lr_schedule"}
)
"""Keys whose change leaves the loss of the first step equal up to rounding."""


class RecentLosses:
    """The losses of the last steps that updated the weights, oldest first."""

    def __init__(self, losses: Iterable[float] = ()) -> None:
        self._losses = deque(losses, maxlen=WINDOW)

    def add(self, loss: float) -> None:
        self._losses.append(loss)

    def replace(self, losses: Iterable[float]) -> None:
        """Set the losses from the checkpoint that is resumed."""
        self._losses.clear()
        self._losses.extend(losses)

    def to_list(self) -> list[float]:
        return list(self._losses)


@dataclass(frozen=True)
class ExpectedLoss:
    """The expected range of the first resumed step's loss. num: number of losses it was computed from."""

    mean: float
    margin: float
    num: int

    def problem(self, loss: float) -> str | None:
        """The message if `loss` is outside the expected range, else None."""
        if abs(loss - self.mean) <= self.margin:
            return None
        return (
            f"the loss of the first resumed step is {loss:.4f}; that of the {self.num} steps before the checkpoint was "
            f"{self.mean:.4f} on average, and {self.mean - self.margin:.4f} to {self.mean + self.margin:.4f} would be "
            "expected. Usual causes: the checkpoint was changed or converted and lacks weights, the tokenizer's files "
            "or the data are not those of the run, the code of the model has changed"
        )


def expected_loss(losses: list[float]) -> ExpectedLoss | None:
    """The expected loss from the losses in a checkpoint; None if there are too few."""
    if len(losses) < ENOUGH:
        return None
    mean = statistics.fmean(losses)
    return ExpectedLoss(mean, max(DEVIATIONS * statistics.stdev(losses) + SHARE * abs(mean), LEAST), len(losses))


def is_comparable(changed_keys: Iterable[str]) -> bool:
    """Whether the first loss is comparable with those of the stopped run although these settings have changed."""
    return all(key.partition(".")[0] in SAME_LOSS_SECTIONS for key in changed_keys)


# -- equal replicas ----------------------------------------------------------------------------------

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The largest prime below 2^16, as in Adler-32. The factors of positions repeat with this period.
MODULUS = 65521


def check_replicas(weights: Mapping[str, Tensor], layouts: Mapping[str, ParameterLayout], ctx: ParallelContext) -> None:
    """Compare a hash of every local tensor over the axes on which it is replicated. Collective.

    Raises TrainingError, on the ranks of every axis that disagrees, with the names and the ranks.
    """
    by_axis: dict[AxisName, list[str]] = {}
    for name in weights:
        # Names are in the same order on the ranks of an axis, so that hashes are compared column by column.
        for axis in copying_axes(layouts[name]):
            if ctx.axis(axis).size > 1:
                by_axis.setdefault(axis, []).append(name)
    problems = [problem for axis, names in by_axis.items() for problem in _differing(axis, names, weights, ctx)]
    if problems:
        shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
        raise TrainingError(
            f"ranks that should have the same weights do not: {shown}. A rank computed something else (a faulty "
            "device, or code that depends on the rank); go on from a checkpoint of before"
        )


def copying_axes(layout: ParameterLayout) -> Iterator[AxisName]:
    """The axes over which a parameter's slice is replicated."""
    yield layout.replicas
    dividing = {split.axis for split in layout.splits}
    yield from (axis for axis in OTHER_AXES[layout.replicas] if axis not in dividing)


def _differing(
    axis_name: AxisName, names: list[str], weights: Mapping[str, Tensor], ctx: ParallelContext
) -> Iterator[str]:
    axis = ctx.axis(axis_name)
    rank_hashes = torch.stack([bit_hash(weights[name]) for name in names])
    # [ranks, names] int64
    hashes = rank_hashes.new_empty((axis.size, len(names)))
    dist.all_gather_into_tensor(hashes.view(-1), rank_hashes, group=axis.group)
    for column, name in enumerate(names):
        values = hashes[:, column].tolist()
        # The majority is taken to be right.
        usual = max(values, key=values.count)
        odd = [axis.ranks[place] for place, value in enumerate(values) if value != usual]
        if odd and values.count(usual) > len(odd):
            yield f"{name} of rank {' and '.join(map(str, odd))} among the {axis_name} ranks {list(axis.ranks)}"
        elif odd:
            yield f"{name} differs among the {axis_name} ranks {list(axis.ranks)}, and no value has a majority"


def bit_hash(tensor: Tensor) -> Tensor:
    """A 64-bit hash of the bits of a tensor and their positions."""
    # Bits and not values: 0.0 and -0.0 differ, and NaN equals itself.
    bits = tensor.detach().contiguous().view(-1).view(INTEGERS[tensor.element_size()]).long()
    places = torch.arange(len(bits), device=bits.device) % MODULUS + 1
    # Integer arithmetic modulo 2^64: exact, and independent of the order of summation on the device.
    return (bits * places).sum()


# -- first module with non-finite values -------------------------------------------------------------


def first_fault(model: nn.Module, ctx: ParallelContext) -> str | None:
    """The first fault in the order of stages and modules; None if no module recorded one. Synchronizes with the
    device. Collective over the world."""
    noted = (module.fault() for module in model.modules() if isinstance(module, ReportsNonFinite))
    # Modules come in the order of the forward pass, and the first fault is the origin of the later ones.
    first = next((fault for fault in noted if fault is not None), None)
    if ctx.world.size == 1:
        return first
    everyone: list[str | None] = [None] * ctx.world.size
    dist.all_gather_object(everyone, first, group=ctx.world.group)
    # Ranks are numbered with the pipeline stage slowest, so the first one with a fault is of the earliest stage.
    return next((fault for fault in everyone if fault is not None), None)


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
