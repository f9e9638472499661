"""An optimizer step that never waits for the device: loss and norm are read while the next step runs.

The number of counted tokens is known on the host. Norm, clipping and whether the step is left out (loss or norm not
finite) are decided on the device, by the scale that the optimizer multiplies gradients with. Loss and norm start
their way to pinned memory at the end of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mt_core.config.schema import Config
from mt_core.data.loader import RankBatch
from mt_core.errors import ConfigError
from mt_core.nn.auxiliary import UpdatesItself, auxiliary_losses
from mt_core.nn.kernels.reference.adamw import clip_scale
from mt_core.optim.main_weights import MainWeights
from mt_core.optim.optimizers import Optimizer
from mt_core.parallel.context import ParallelContext
from mt_core.train.step import Batch, MicroBatches, ScalesGradients, StepOutcome, masked_sum, set_learning_rate


@dataclass(frozen=True)
class PendingOutcome:
    """values: loss and norm, on their way to the host. arrived: recorded behind them; None on CPU."""

    values: Tensor
    arrived: torch.cuda.Event | None
    tokens: float

    def result(self) -> StepOutcome:
        """Waits for this step, not for those launched after it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, norm = self.values.tolist()
        return StepOutcome(loss, norm, self.tokens, updated=math.isfinite(loss) and math.isfinite(norm))


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
    """Of one process that has the whole model. The optimizer changes nothing when its scale is not finite."""

    def __init__(
        self, weights: MainWeights, optimizer: Optimizer, micro_batches: MicroBatches, clip_grad: float
    ) -> None:
        self.weights, self.optimizer, self.micro_batches, self.clip_grad = weights, optimizer, micro_batches, clip_grad

    def __call__(self, micro_batches: Sequence[Batch], learning_rate: float, tokens: float) -> PendingOutcome:
        """tokens: unmasked ones of all micro-batches."""

        def share(losses: Tensor, batch: Batch) -> Tensor:
            return masked_sum(losses, batch["loss_mask"]) / max(tokens, 1.0)

        self.weights.zero_grad()
        self.weights.expect(len(micro_batches))
        loss = self.micro_batches.forward_backward(micro_batches, share)
        self.weights.reduce()
        gradients = [p.grad for _, p in self.weights.named_parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        scale = clip_scale(norm, self.clip_grad or math.inf)
        assert isinstance(self.optimizer, ScalesGradients)
        self.optimizer.gradient_scale = torch.where(torch.isfinite(loss), scale, math.nan)
        set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.step()
        self.weights.publish()
        return _fetch(torch.stack((loss.to(norm.device), norm.to(loss.dtype))), tokens)


def _fetch(values: Tensor, tokens: float) -> PendingOutcome:
    if values.device.type == "cpu":
        return PendingOutcome(values, None, tokens)
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    pinned.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return PendingOutcome(pinned, arrived, tokens)


def counted_tokens(rank_batch: RankBatch) -> float:
    """Positions whose loss counts, from the arrays on the host."""
    return float(sum(arrays["loss_mask"].sum() for arrays in rank_batch.micro_batches))


def tells_late(config: Config, ctx: ParallelContext, model: nn.Module, optimizer: Optimizer) -> bool:
    """Whether train.late_metrics takes effect. Raises ConfigError when it is `always` and something needs the numbers
    of a step before the next one."""
    wanted = config.train.late_metrics
    if wanted == "never" or (wanted == "auto" and ctx.device.type != "cuda"):
        return False
    reason = _needs_numbers_at_once(config, ctx, model, optimizer)
    if reason is not None and wanted == "always":
        raise ConfigError(f"train.late_metrics=always cannot be: {reason}; set it to auto or never")
    return reason is None


def _needs_numbers_at_once(config: Config, ctx: ParallelContext, model: nn.Module, optimizer: Optimizer) -> str | None:
    if ctx.world.size > 1:
        return f"{ctx.world.size} processes sum their losses on the host"
    if config.precision.dtype == "fp16":
        return "precision.dtype=fp16 chooses the next loss scale by the norm"
    if config.logging.log_num_zeros_in_grad:
        return "logging.log_num_zeros_in_grad=true counts on the host"
    if next(iter(auxiliary_losses(model)), None) is not None:
        return "the model's layers have losses of their own, which are read on the host"
    if any(isinstance(module, UpdatesItself) for module in model.modules()):
        return "the model's layers update themselves after a step"
    if not isinstance(optimizer, ScalesGradients):
        return (
            f"optimizer.optimizer={config.optimizer.optimizer} does not scale gradients by a number on the device "
            "(adam does with kernels.adamw=triton, or exp_avg_dtype=bf16, or main_weights=remainders)"
        )
    return None
