"""An optimizer step that never waits for the device: loss and norm are read while the next step runs.

Numbers stay on the device, as [] tensors in fp64: they are summed over ranks there, and clipping and whether the step
is left out (loss or norm not finite) are decided there, by what the optimizer multiplies gradients with. The numbers
start their way to pinned memory at the end of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mt_core._torch_compat import scale_all_
from mt_core.config.schema import Config
from mt_core.data.loader import RankBatch
from mt_core.errors import ConfigError
from mt_core.nn.auxiliary import UpdatesItself, auxiliary_losses
from mt_core.optim.gradients import GradientSums
from mt_core.optim.main_weights import MainWeights
from mt_core.optim.optimizers import Optimizer
from mt_core.parallel.collectives import all_reduce
from mt_core.parallel.context import Axis, ParallelContext
from mt_core.train.auxiliary_means import AuxiliaryMeans, on_device, sum_on_device
from mt_core.train.step import Batch, MicroBatches, ScalesGradients, StepOutcome, masked_sum, set_learning_rate


@runtime_checkable
class LeavesStepsOut(Protocol):
    """An optimizer whose `step` changes nothing where found_inf, [] fp32 on the device, is 1."""

    found_inf: Tensor | None


@dataclass(frozen=True)
class Fetched:
    """Numbers on their way to the host. arrived: recorded behind them; None on CPU."""

    values: Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def start(cls, values: Tensor) -> Fetched:
        """values: [n], on any device"""
        if values.device.type == "cpu":
            return cls(values, None)
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        pinned.copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(pinned, arrived)

    def result(self) -> list[float]:
        """Waits for them, not for what was launched after them."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return list(self.values.tolist())


@dataclass(frozen=True)
class PendingOutcome:
    """numbers: loss, norm, tokens, and an auxiliary loss for each name."""

    numbers: Fetched
    auxiliary: Sequence[str]

    def result(self) -> StepOutcome:
        """Waits for this step, not for those launched after it."""
        loss, norm, tokens, *own = self.numbers.result()
        updated = math.isfinite(loss) and math.isfinite(norm)
        return StepOutcome(loss, norm, tokens, updated, auxiliary=dict(zip(self.auxiliary, own, strict=True)))


@dataclass(frozen=True)
class TakenStep:
    """A step that was launched, for the log. iteration, consumed_samples: after it. started: in perf_counter's time."""

    rank_batch: RankBatch
    outcome: StepOutcome | PendingOutcome
    iteration: int
    consumed_samples: int
    learning_rate: float
    started: float


class LateStep:
    """What OptimizerStep does without loss scaling, with the same numbers. The optimizer changes nothing in a step that
    is left out; modules that update themselves do, and the run ends there. Making it is collective over stages."""

    def __init__(
        self,
        model: nn.Module,
        weights: MainWeights,
        optimizer: Optimizer,
        micro_batches: MicroBatches,
        clip_grad: float,
        sums: GradientSums,
    ) -> None:
        self.weights, self.optimizer, self.micro_batches, self.clip_grad = weights, optimizer, micro_batches, clip_grad
        self.sums, self.ctx = sums, sums.ctx
        self.auxiliary = AuxiliaryMeans(list(auxiliary_losses(model)), self.ctx)
        self.updated_after = [module for module in model.modules() if isinstance(module, UpdatesItself)]

    def __call__(self, micro_batches: Sequence[Batch], learning_rate: float, counted: float) -> PendingOutcome:
        """counted: unmasked tokens of this data-parallel rank's micro-batches, of whole sequences."""
        tokens = self._tokens(counted)
        self.weights.zero_grad()
        self.weights.expect(len(micro_batches))
        self.auxiliary.begin(len(micro_batches))
        loss = self._over_ranks(self.micro_batches.forward_backward(micro_batches, partial(_share, tokens)))
        self.weights.reduce()
        self.sums.complete(self.weights.named_parameters())
        norm = self.sums.norm(self.weights.named_parameters()).double()
        self._scale_gradients(_scale(loss, norm, self.clip_grad))
        set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.step()
        self.weights.publish()
        for module in self.updated_after:
            module.after_step()
        told = torch.stack([loss, norm, on_device(tokens, self.ctx), *self.auxiliary.take(len(micro_batches))])
        return PendingOutcome(Fetched.start(told), self.auxiliary.names)

    def _tokens(self, counted: float) -> float | Tensor:
        """Over all data-parallel ranks; on the host where that needs no other rank."""
        return counted if self.ctx.dp.size == 1 else all_reduce(on_device(counted, self.ctx), self.ctx.dp)

    def _over_ranks(self, loss: Tensor) -> Tensor:
        return sum_on_device(sum_on_device(on_device(loss, self.ctx), self.ctx.dp_cp), self.ctx.pp)

    def _scale_gradients(self, scale: Tensor) -> None:
        """scale: [] fp32, not a number if the step is to be left out"""
        if isinstance(self.optimizer, ScalesGradients):
            self.optimizer.gradient_scale = scale
            return
        assert isinstance(self.optimizer, LeavesStepsOut)
        scale_all_([p.grad for _, p in self.weights.named_parameters() if p.grad is not None], scale)
        self.optimizer.found_inf = scale.isnan().float()


def _share(tokens: float | Tensor, losses: Tensor, batch: Batch) -> Tensor:
    """A batch without a counted token has loss 0 and gradient 0, not 0/0."""
    whole = masked_sum(losses, batch["loss_mask"])
    return whole / (max(tokens, 1.0) if isinstance(tokens, float) else tokens.clamp(min=1.0).to(whole.dtype))


def _scale(loss: Tensor, norm: Tensor, limit: float) -> Tensor:
    """[] fp32: what gradients are multiplied by so that their norm is at most `limit` (0: no limit); not a number if
    the loss or the norm is not finite. To the bit what `clip_factor` has on the host."""
    scale = torch.ones_like(norm)
    if limit > 0.0:
        scale = (torch.full_like(norm, limit) / (norm + 1e-6)).clamp(max=1.0)
    return torch.where(torch.isfinite(loss) & torch.isfinite(norm), scale, math.nan).float()


class AgreedLate:
    """Whether a flag is set on any rank of an axis: each call says it of the call before, at the first it is not set.

    Collective, and without waiting for what the device was given since the call before.
    """

    def __init__(self, ctx: ParallelContext, axis: Axis) -> None:
        self.ctx, self.axis = ctx, axis
        self._before: Fetched | None = None

    def __call__(self, flag: bool) -> bool:
        if self.axis.size == 1:
            return flag
        before, total = self._before, all_reduce(on_device(float(flag), self.ctx), self.axis)
        self._before = Fetched.start(total.view(1))
        return before is not None and before.result()[0] > 0


def counted_tokens(rank_batch: RankBatch) -> float:
    """Positions whose loss counts, from the arrays on the host."""
    return float(sum(arrays["loss_mask"].sum() for arrays in rank_batch.micro_batches))


def tells_late(config: Config, ctx: ParallelContext, optimizer: Optimizer) -> bool:
    """Whether train.late_metrics takes effect. Raises ConfigError when it is `always` and something needs the numbers
    of a step before the next one."""
    wanted = config.train.late_metrics
    if wanted == "never" or (wanted == "auto" and ctx.device.type != "cuda"):
        return False
    reason = _needs_numbers_at_once(config, optimizer)
    if reason is not None and wanted == "always":
        raise ConfigError(f"train.late_metrics=always cannot be: {reason}; set it to auto or never")
    return reason is None


def _needs_numbers_at_once(config: Config, optimizer: Optimizer) -> str | None:
    if config.precision.dtype == "fp16":
        return "precision.dtype=fp16 chooses the next loss scale by the norm"
    if config.logging.log_num_zeros_in_grad:
        return "logging.log_num_zeros_in_grad=true counts on the host"
    if config.logging.trace_schedule is not None:
        return f"logging.trace_schedule={config.logging.trace_schedule} times one step from its start to its end"
    if not isinstance(optimizer, ScalesGradients | LeavesStepsOut):
        return (
            f"optimizer.optimizer={config.optimizer.optimizer} has no way to leave a step out on the device "
            "(adam has one)"
        )
    return None
