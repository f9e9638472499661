"""One optimizer step: forward and backward over micro-batches, gradient norm, clipping, update.

Loss, norm and token count are fp64 scalars on the device. They are copied to the host at the end of the step, and the
caller reads them at once or one step later (`train.deferred_metrics`). In the latter case the host never waits for the
device within a step, and a step with a non-finite loss or norm is skipped on the device: its gradient factor is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mt_core._torch_compat import scale_all_
from mt_core.config.schema import Config
from mt_core.data.loss_weights import WEIGHTS, LossCounts
from mt_core.errors import ConfigError
from mt_core.nn.auxiliary import AuxiliaryLoss, PostStepHook, auxiliary_losses
from mt_core.nn.loss import weighted_sum
from mt_core.optim.base import Optimizer
from mt_core.optim.finalize_grads import GradFinalizer, TiedWeights
from mt_core.optim.loss_scale import LossScaler
from mt_core.optim.master_weights import MasterWeights
from mt_core.parallel.context import Axis, ParallelContext
from mt_core.train.host_transfer import HostTransfer, device_scalar, sum_of_host_numbers, sum_on_device
from mt_core.train.step.forward_backward import Batch, ForwardBackward
from mt_core.train.time_parts import DEVICE_WAIT, TimeParts

# -- auxiliary losses of layers, averaged over micro-batches and ranks -------------------------------


class AuxiliaryMeans:
    """Auxiliary losses of all pipeline stages, each the mean over the micro-batches of all data-parallel ranks.

    Construction is collective over the pipeline stages, which exchange the names of their losses.
    """

    def __init__(self, losses: Sequence[AuxiliaryLoss], ctx: ParallelContext) -> None:
        self.own, self.ctx = {loss.name: loss for loss in losses}, ctx
        self.names = _names_on_all_stages(list(self.own), ctx.pp)

    def begin(self, passes: int, scale: float = 1.0) -> None:
        """passes: micro-batches of the step. scale: the loss scale, applied to the auxiliary gradients too."""
        for auxiliary in self.own.values():
            # Gradients are summed over passes and data-parallel ranks; with this factor their sum is that of the mean.
            auxiliary.scale = scale / (passes * self.ctx.dp.size)

    def take(self, passes: int) -> list[Tensor]:
        """For each of `names` its mean, [] fp64 on the device, unscaled. Does not synchronize with the device."""
        if not self.names:
            return []
        # Every stage gives a number for each name, 0 for those of other stages, so that one all-reduce over the stages
        # merges them.
        totals = {name: loss.take_on_device() for name, loss in self.own.items()}
        in_order = [totals.get(name) for name in self.names]
        means = torch.stack([device_scalar(0.0 if total is None else total, self.ctx) for total in in_order]) / passes
        # dp and not dp_cp: all ranks that share a micro-batch have the same value (see AuxiliaryLoss).
        return list(sum_on_device(sum_on_device(means / self.ctx.dp.size, self.ctx.dp), self.ctx.pp))


def _names_on_all_stages(stage_names: list[str], pp: Axis) -> list[str]:
    """The names in the order of the stages. Names are unique over the stages."""
    if pp.size == 1:
        return stage_names
    everyone: list[list[str] | None] = [None] * pp.size
    dist.all_gather_object(everyone, stage_names, group=pp.group)
    return [name for of_stage in everyone for name in of_stage or []]


@runtime_checkable
class ScalesGradients(Protocol):
    """An optimizer that scales gradients as it reads them. A NaN factor makes the step a no-op."""

    gradient_scale: Tensor | None


@runtime_checkable
class SupportsFoundInf(Protocol):
    """An optimizer whose `step` is a no-op where found_inf, [] fp32 on the device, is 1."""

    found_inf: Tensor | None


@dataclass(frozen=True)
class StepOutcome:
    """loss: of the global batch (train.loss_normalization). grad_norm: before clipping, unscaled. tokens: positions of
    the global batch whose loss has a weight above 0.

    auxiliary: the losses that layers added, by name, each the mean over micro-batches. logits: of an engine that is
    built with return_logits, [rows, S, vocabulary]; None on ranks without the last pipeline stage.
    """

    loss: float
    grad_norm: float
    tokens: float
    updated: bool
    """False when the loss or the norm was not finite and the step was skipped."""
    auxiliary: Mapping[str, float] = field(default_factory=dict)
    zeros_in_grad: int | None = None
    logits: Tensor | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """All numbers by name: grad_norm, tokens, zeros_in_grad where they are counted, and what layers added."""
        counted = {} if self.zeros_in_grad is None else {"zeros_in_grad": float(self.zeros_in_grad)}
        return {"grad_norm": self.grad_norm, "tokens": self.tokens, **counted, **self.auxiliary}


@dataclass(frozen=True)
class PendingOutcome:
    """numbers: loss, norm, auxiliary losses in the order of `auxiliary`, and the token count if on the device.

    skipped: the host has seen that the step changes nothing; False also where it decides on the device.
    """

    numbers: HostTransfer
    auxiliary: Sequence[str]
    tokens: float | None = None
    zeros_in_grad: int | None = None
    skipped: bool = False

    def result(self) -> StepOutcome:
        """Waits for this step, not for those launched after it."""
        loss, norm, *more = self.numbers.result()
        # _pending() appends the token count last.
        tokens = more.pop() if self.tokens is None else self.tokens
        updated = math.isfinite(loss) and math.isfinite(norm)
        auxiliary = dict(zip(self.auxiliary, more, strict=True))
        return StepOutcome(loss, norm, tokens, updated, auxiliary, self.zeros_in_grad)


ComputeGradients = Callable[[Sequence[Batch], float | Tensor], tuple[Tensor, Tensor]]
"""(micro-batches, divisor of the loss) -> (loss, gradient norm), [] fp64 on the device; leaves the gradients of the
step with the weights. Launches only, where the divisor is on the device."""
CaptureGradients = Callable[[ComputeGradients, Sequence[Batch], Tensor], tuple[Tensor, Tensor]]
"""Runs such a function, or a graph captured from it (`train.cuda_graphs=step`)."""


class OptimizerStep:
    """Defines the order of operations in a step. The caller owns the model and the optimizer.

    deferred: no operation of the step waits for the device; requires `defers_metrics`. capture: runs what comes before
    the update. on_gradients: called when the gradients are reduced, before clipping; nothing is captured then.
    Construction is collective over pipeline stages.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: MasterWeights,
        optimizer: Optimizer,
        forward_backward: ForwardBackward,
        scaler: LossScaler,
        clip_grad: float,
        sums: GradFinalizer | None = None,
        *,
        count_zeros: bool = False,
        deferred: bool = False,
        capture: CaptureGradients | None = None,
        time: TimeParts | None = None,
    ) -> None:
        self.time = time or TimeParts()
        self.weights, self.optimizer, self.forward_backward = weights, optimizer, forward_backward
        self.scaler, self.clip_grad, self.count_zeros, self.deferred = scaler, clip_grad, count_zeros, deferred
        self.sums = sums or GradFinalizer({}, ParallelContext(), TiedWeights(), sharded=False)
        self.ctx = self.sums.ctx
        self.auxiliary = AuxiliaryMeans(list(auxiliary_losses(model)), self.ctx)
        self.capture = capture
        self.on_gradients: Callable[[], None] | None = None
        self._passes = 0
        # Such as routers with expert bias, which is updated from the counts of the step.
        self.updated_after = [module for module in model.modules() if isinstance(module, PostStepHook)]

    def __call__(self, micro_batches: Sequence[Batch], learning_rate: float, counts: LossCounts) -> PendingOutcome:
        """Update the weights from one global batch.

        counts: of the whole sequences of this data-parallel rank's micro-batches. Weighted losses are summed and
        divided by the divisor of all ranks.
        """
        # begin (zero_grad, expect) -> passes, with overlapped reductions -> reduce -> finalize_model_grads -> norm ->
        # clip -> optimizer -> copy_to_model (all-gather) -> after_step. Everything up to the norm may be one captured
        # graph.
        divisor, tokens = self.global_counts(counts)
        # A replay runs no Python, so the callback would not be called.
        if self.capture is None or self.on_gradients is not None:
            loss, norm = self._compute_gradients(micro_batches, divisor)
        else:
            self._passes = len(micro_batches)  # a replay runs no `begin`
            with self.time("graph"):
                loss, norm = self.capture(self._compute_gradients, micro_batches, device_scalar(divisor, self.ctx))
        return self._clip_and_update(loss, norm, learning_rate, tokens)

    def _compute_gradients(self, micro_batches: Sequence[Batch], divisor: float | Tensor) -> tuple[Tensor, Tensor]:
        """ComputeGradients."""
        scale = self.scaler.scale
        self.begin(len(micro_batches))

        def share(losses: Tensor, batch: Batch) -> Tensor:
            # Divided by the divisor of all ranks before backward, so that gradients are summed over micro-batches and
            # ranks. A mean of each micro-batch would give the tokens of short ones more weight.
            part = divided(weighted_sum(losses, batch[WEIGHTS]), divisor)
            return part * scale if scale != 1.0 else part

        return self._reduce(self.forward_backward.forward_backward(micro_batches, share))

    def begin(self, passes: int) -> None:
        """Clear the gradients, and expect so many backward passes."""
        self._passes = passes
        self.weights.zero_grad()
        self.weights.expect(passes)
        self.auxiliary.begin(passes, self.scaler.scale)

    def finish(self, contribution: Tensor, learning_rate: float, tokens: float | Tensor) -> PendingOutcome:
        """Reduce the gradients of the passes, and update the weights. contribution: this rank's to the scaled loss."""
        loss, norm = self._reduce(contribution)
        return self._clip_and_update(loss, norm, learning_rate, tokens)

    def _reduce(self, contribution: Tensor) -> tuple[Tensor, Tensor]:
        """Reduce the gradients of the passes. Returns the loss and the gradients' norm, without the loss scale."""
        scale = self.scaler.scale
        # Launched before the weights' reductions are waited for.
        loss = _unscaled(self._over_ranks(contribution), scale)
        with self.time("communication"):
            self.weights.reduce()
            self.sums.finalize_model_grads(self.weights.named_parameters())
        if self.on_gradients is not None:
            self.on_gradients()
        # The norm of scaled gradients is divided by the scale, which is cheaper than to unscale them first; their
        # factor is applied together with that of the clipping.
        return loss, _unscaled(self.sums.norm(self.weights.named_parameters()).double(), scale)

    def _clip_and_update(
        self, loss: Tensor, norm: Tensor, learning_rate: float, tokens: float | Tensor
    ) -> PendingOutcome:
        # The scale of this step: update() below may change it for the next one.
        pending, scale = self._pending(loss, norm, tokens, self._passes), self.scaler.scale
        if self.deferred:
            self._scale_gradients_or_skip(device_clip_factor(loss, norm, self.clip_grad))
            self._update(learning_rate)
        else:
            # Waits for the device: the host decides whether to update.
            with self.time(DEVICE_WAIT):
                outcome = pending.result()
            pending = replace(pending, skipped=not outcome.updated)
            self.scaler.update(overflowed=pending.skipped)
            if outcome.updated:
                self._scale_gradients(clip_factor(outcome.grad_norm, self.clip_grad) / scale)
                self._update(learning_rate)
        # After a skipped step as well, so that no counts of it are left over.
        for module in self.updated_after:
            module.after_step()
        return pending

    def global_counts(self, counts: LossCounts) -> tuple[float | Tensor, float | Tensor]:
        """(divisor of the loss, tokens) over all data-parallel ranks; on the host if the axis has one rank."""
        divisor, tokens = sum_of_host_numbers((counts.divisor, counts.tokens), self.ctx.dp, self.ctx)
        return divisor, tokens

    def _over_ranks(self, loss: Tensor) -> Tensor:
        """Sum over the data-, context- and pipeline-parallel ranks; the same value on every rank."""
        total = loss.to(self.ctx.device, torch.float64)
        # Ranks without the last stage contribute 0. The sum over tp is left out: its ranks have equal losses.
        return sum_on_device(sum_on_device(total, self.ctx.dp_cp), self.ctx.pp)

    def _pending(self, loss: Tensor, norm: Tensor, tokens: float | Tensor, passes: int) -> PendingOutcome:
        # Counted before clipping, whose factor may round small gradients to zero.
        zeros = self.sums.zeros(self.weights.named_parameters()) if self.count_zeros else None
        numbers = [loss, norm, *self.auxiliary.take(passes)]
        if isinstance(tokens, Tensor):
            numbers.append(tokens)
        counted = None if isinstance(tokens, Tensor) else tokens
        # One transfer for all numbers of the step.
        return PendingOutcome(HostTransfer.start(torch.stack(numbers)), self.auxiliary.names, counted, zeros)

    def _scale_gradients(self, factor: float) -> None:
        if isinstance(self.optimizer, ScalesGradients):
            self.optimizer.gradient_scale = torch.tensor(factor, device=self.ctx.device)
        # A pass over all gradients, saved when nothing is clipped.
        elif factor != 1.0:
            scale_all_(self._gradients(), factor)

    def _scale_gradients_or_skip(self, factor: Tensor) -> None:
        """factor: NaN if the step is to be skipped."""
        if isinstance(self.optimizer, ScalesGradients):
            self.optimizer.gradient_scale = factor.float()
            return
        assert isinstance(self.optimizer, SupportsFoundInf)
        # Always: the host does not see whether the factor is 1. In a skipped step the gradients become NaN and the
        # optimizer's step changes nothing.
        scale_all_(self._gradients(), factor.float())
        self.optimizer.found_inf = factor.isnan().float()

    def _gradients(self) -> list[Tensor]:
        return [p.grad for _, p in self.weights.named_parameters() if p.grad is not None]

    def _update(self, learning_rate: float) -> None:
        with self.time("optimizer"):
            set_learning_rate(self.optimizer, learning_rate)
            self.optimizer.step()
            self.weights.copy_to_model()


def divided(total: Tensor, divisor: float | Tensor) -> Tensor:
    """A batch without a weight above 0 has loss 0 and gradient 0, not 0/0."""
    if isinstance(divisor, Tensor):
        return total / torch.where(divisor > 0, divisor, 1.0).to(total.dtype)
    return total / (divisor or 1.0)


def _unscaled(value: Tensor, scale: float) -> Tensor:
    return value / scale if scale != 1.0 else value


def clip_factor(norm: float, limit: float) -> float:
    """Factor on the gradients that limits their global norm to `limit` (0: no limit)."""
    # 1e-6: as torch.nn.utils.clip_grad_norm_ and Megatron have it.
    return min(limit / (norm + 1e-6), 1.0) if limit > 0.0 else 1.0


def device_clip_factor(loss: Tensor, norm: Tensor, limit: float) -> Tensor:
    """[] fp64: the same bits as `clip_factor`; NaN if the loss or the norm is not finite. loss, norm: [] fp64."""
    factor = torch.ones_like(norm)
    if limit > 0.0:
        factor = (torch.full_like(norm, limit) / (norm + 1e-6)).clamp(max=1.0)
    # loss too: it may overflow where its gradient does not.
    return torch.where(torch.isfinite(loss) & torch.isfinite(norm), factor, math.nan)


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        # decoupled_lr is set by GroupSchedules.prepare.
        group["lr"] = group.get("decoupled_lr", learning_rate) * group.get("lr_mult", 1.0)


def defers_metrics(config: Config, ctx: ParallelContext, optimizer: Optimizer) -> bool:
    """Whether metrics are read one step later (train.deferred_metrics). Raises ConfigError when the key is `always` and
    something needs the numbers of a step before the next one starts."""
    wanted = config.train.deferred_metrics
    if wanted == "never" or (wanted == "auto" and ctx.device.type != "cuda"):
        return False
    reason = needs_numbers_at_once(config, optimizer)
    if reason is not None and wanted == "always":
        raise ConfigError(f"train.deferred_metrics=always is not possible: {reason}; set it to auto or never")
    return reason is None


def needs_numbers_at_once(config: Config, optimizer: Optimizer) -> str | None:
    """The setting that needs the numbers of a step before the next one starts, and why; None if there is no such."""
    if config.precision.dtype == "fp16":
        return "precision.dtype=fp16 chooses the next loss scale by the norm"
    if config.logging.log_num_zeros_in_grad:
        return "logging.log_num_zeros_in_grad=true counts on the host"
    if config.logging.trace_schedule is not None:
        return f"logging.trace_schedule={config.logging.trace_schedule} measures one step from its start to its end"
    if not isinstance(optimizer, ScalesGradients | SupportsFoundInf):
        return f"optimizer.optimizer={config.optimizer.optimizer} cannot skip a step on the device (adam can)"
    return None
