"""One optimizer step: forward and backward over micro-batches, norm, clip, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mt_core._torch_compat import scale_all_
from mt_core.nn.auxiliary import UpdatesItself, auxiliary_losses
from mt_core.nn.loss import Loss
from mt_core.optim.gradients import GradientSums
from mt_core.optim.loss_scale import LossScaler
from mt_core.optim.main_weights import MainWeights, WholeWeights
from mt_core.optim.optimizers import Optimizer
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.data import sum_over
from mt_core.parallel.stage_copies import StageCopies
from mt_core.train.auxiliary_means import AuxiliaryMeans

Batch = Mapping[str, Tensor]
ForwardStep = Callable[[nn.Module, Batch], Tensor]
"""(model, micro-batch) -> losses [batch, sequence], before masking"""
Share = Callable[[Tensor, Batch], Tensor]
"""(losses [batch, sequence], micro-batch) -> its part of the loss of the step, a scalar"""

MODEL_INPUTS = ("tokens", "position_ids", "segment_ids")


def default_forward_step(loss: Loss) -> ForwardStep:
    """model(inputs of the batch), then the loss. A model's `inputs` attribute names other inputs, a loss's
    `model_options` further arguments of the model."""
    options = getattr(loss, "model_options", {})

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        names = getattr(model, "inputs", MODEL_INPUTS)
        return loss(model(**{name: batch[name] for name in names if name in batch}, **options), batch)

    return forward


@dataclass(frozen=True)
class StepOutcome:
    """loss: mean over the counted tokens of the global batch. grad_norm: before clipping, unscaled.

    auxiliary: the losses that layers added, by name, each the mean over micro-batches.
    """

    loss: float
    grad_norm: float
    tokens: float
    updated: bool
    """False when the loss or the norm was not finite and the step was left out."""
    auxiliary: Mapping[str, float] = field(default_factory=dict)
    zeros_in_grad: int | None = None

    def result(self) -> StepOutcome:
        """What is there already."""
        return self


class MicroBatches(Protocol):
    """Carries micro-batches through the model, forward and backward."""

    def forward_backward(self, batches: Sequence[Batch], share: Share) -> Tensor:
        """Sum of the shares; gradients are added up in the parameters. 0 on a rank that has no output."""
        ...

    def forward(self, batches: Sequence[Batch], share: Share) -> Tensor:
        """The same without gradients."""
        ...


@runtime_checkable
class ScalesGradients(Protocol):
    """An optimizer that multiplies gradients while it reads them."""

    gradient_scale: Tensor | None


class OneByOne:
    """The whole model on this rank: each micro-batch goes forward and back before the next."""

    def __init__(
        self,
        model: nn.Module,
        forward_step: ForwardStep,
        weights: MainWeights | None = None,
        begin: Callable[[Batch], object] = lambda batch: None,
    ) -> None:
        self.model, self.forward_step, self.begin = model, forward_step, begin
        self.weights = weights or WholeWeights(model)

    def forward_backward(self, batches: Sequence[Batch], share: Share) -> Tensor:
        total = torch.zeros(())
        for number, batch in enumerate(batches):
            self.weights.begin_pass(number)
            self.begin(batch)
            part = share(self.forward_step(self.model, batch), batch)
            part.backward()
            total = total + part.detach()
        return total

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch], share: Share) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            total = total + share(self.forward_step(self.model, batch), batch).double()
        return total


class OptimizerStep:
    """Owns the order of things in a step. The model and the optimizer are the caller's."""

    def __init__(
        self,
        model: nn.Module,
        weights: MainWeights,
        optimizer: Optimizer,
        micro_batches: MicroBatches,
        scaler: LossScaler,
        clip_grad: float,
        sums: GradientSums | None = None,
        *,
        count_zeros: bool = False,
    ) -> None:
        self.model, self.weights, self.optimizer = model, weights, optimizer
        self.micro_batches, self.scaler, self.clip_grad, self.count_zeros = (
            micro_batches,
            scaler,
            clip_grad,
            count_zeros,
        )
        self.sums = sums or GradientSums({}, ParallelContext(), StageCopies(), divided=False)
        self.ctx = self.sums.ctx
        self.auxiliary = AuxiliaryMeans(list(auxiliary_losses(model)), self.ctx)
        self.on_gradients: Callable[[], None] | None = None
        """Called when gradients are complete, before they are clipped and used."""
        self.updated_after = [module for module in model.modules() if isinstance(module, UpdatesItself)]

    def __call__(self, micro_batches: Sequence[Batch], learning_rate: float) -> StepOutcome:
        """Update the weights from one global batch. Losses are summed and divided by the count of unmasked tokens."""
        counted = float(sum(batch["loss_mask"].sum() for batch in micro_batches))
        (tokens,) = sum_over([counted], self.ctx.dp_cp, self.ctx.device)
        self.weights.zero_grad()
        self.weights.expect(len(micro_batches))
        scale = self.scaler.scale
        self.auxiliary.begin(len(micro_batches), scale)

        def share(losses: Tensor, batch: Batch) -> Tensor:
            # A batch without a counted token has loss 0 and gradient 0, not 0/0.
            part = masked_sum(losses, batch["loss_mask"]) / max(tokens, 1.0)
            return part * scale if scale != 1.0 else part

        loss = float(self.micro_batches.forward_backward(micro_batches, share)) / scale
        return self._update(self._over_ranks(loss), tokens, len(micro_batches), learning_rate)

    def _over_ranks(self, loss: float) -> float:
        """The sum over samples, positions and pipeline stages; the same number on every rank."""
        (over_samples,) = sum_over([loss], self.ctx.dp_cp, self.ctx.device)
        (over_stages,) = sum_over([over_samples], self.ctx.pp, self.ctx.device)
        return over_stages

    def _update(self, loss: float, tokens: float, passes: int, learning_rate: float) -> StepOutcome:
        self.weights.reduce()
        self.sums.complete(self.weights.named_parameters())
        if self.on_gradients is not None:
            self.on_gradients()
        scale = self.scaler.scale
        norm = float(self.sums.norm(self.weights.named_parameters())) / scale
        zeros = self.sums.zeros(self.weights.named_parameters()) if self.count_zeros else None
        auxiliary = self._auxiliary_losses(passes)
        overflowed = not math.isfinite(norm) or not math.isfinite(loss)
        self.scaler.update(overflowed)
        if overflowed:
            return StepOutcome(loss, norm, tokens, updated=False, auxiliary=auxiliary, zeros_in_grad=zeros)
        factor = clip_factor(norm, self.clip_grad) / scale
        if isinstance(self.optimizer, ScalesGradients):
            self.optimizer.gradient_scale = torch.tensor(factor, device=self.ctx.device)
        elif factor != 1.0:
            scale_all_([p.grad for _, p in self.weights.named_parameters() if p.grad is not None], factor)
        set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.step()
        self.weights.publish()
        for module in self.updated_after:
            module.after_step()
        return StepOutcome(loss, norm, tokens, updated=True, auxiliary=auxiliary, zeros_in_grad=zeros)

    def _auxiliary_losses(self, passes: int) -> dict[str, float]:
        means = self.auxiliary.take(passes)
        return dict(zip(self.auxiliary.names, torch.stack(means).tolist(), strict=True)) if means else {}


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group.get("decoupled_lr", learning_rate) * group.get("lr_mult", 1.0)


def clip_factor(norm: float, limit: float) -> float:
    """What gradients are multiplied by so that their global norm is at most `limit` (0: no limit)."""
    return min(limit / (norm + 1e-6), 1.0) if limit > 0.0 else 1.0


def masked_sum(losses: Tensor, mask: Tensor) -> Tensor:
    """Sum of losses where mask is 1. A masked position adds exactly 0, even if its loss is not finite."""
    return losses.masked_fill(mask == 0, 0.0).sum()
