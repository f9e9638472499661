"""One optimizer step: forward and backward over micro-batches, norm, clip, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mt_core._torch_compat import scale_all_
from mt_core.nn.loss import Loss
from mt_core.optim.loss_scale import LossScaler
from mt_core.optim.main_weights import MainWeights
from mt_core.optim.optimizers import Optimizer
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.data import sum_gradients, sum_over

Batch = Mapping[str, Tensor]
ForwardStep = Callable[[nn.Module, Batch], Tensor]
"""(model, micro-batch) -> losses [batch, sequence], before masking"""

MODEL_INPUTS = ("tokens", "position_ids", "segment_ids")


def default_forward_step(loss: Loss) -> ForwardStep:
    """model(inputs of the batch), then the loss. A model's `inputs` attribute names other inputs."""

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        names = getattr(model, "inputs", MODEL_INPUTS)
        return loss(model(**{name: batch[name] for name in names if name in batch}), batch)

    return forward


@dataclass(frozen=True)
class StepOutcome:
    """loss: mean over the counted tokens of the global batch. grad_norm: before clipping, unscaled."""

    loss: float
    grad_norm: float
    tokens: float
    updated: bool
    """False when the loss or the norm was not finite and the step was left out."""


class OptimizerStep:
    """Owns the order of things in a step. The model and the optimizer are the caller's."""

    def __init__(
        self,
        model: nn.Module,
        weights: MainWeights,
        optimizer: Optimizer,
        forward_step: ForwardStep,
        scaler: LossScaler,
        clip_grad: float,
        ctx: ParallelContext | None = None,
    ) -> None:
        self.model, self.weights, self.optimizer = model, weights, optimizer
        self.forward_step, self.scaler, self.clip_grad = forward_step, scaler, clip_grad
        self.ctx = ctx or ParallelContext()

    def __call__(self, micro_batches: Sequence[Batch], learning_rate: float) -> StepOutcome:
        """Update the weights from one global batch. Losses are summed and divided by the count of unmasked tokens."""
        counted = float(sum(batch["loss_mask"].sum() for batch in micro_batches))
        (tokens,) = sum_over([counted], self.ctx.dp_cp, self.ctx.device)
        self.weights.zero_grad()
        # A batch without a counted token has loss 0 and gradient 0, not 0/0.
        loss = sum((self._accumulate(batch, max(tokens, 1.0)) for batch in micro_batches), torch.zeros(()))
        (whole_loss,) = sum_over([float(loss)], self.ctx.dp_cp, self.ctx.device)
        return self._update(whole_loss, tokens, learning_rate)

    def _accumulate(self, batch: Batch, tokens: float) -> Tensor:
        """Forward and backward of one micro-batch; returns its share of the loss."""
        share = masked_sum(self.forward_step(self.model, batch), batch["loss_mask"]) / tokens
        (share * self.scaler.scale if self.scaler.scale != 1.0 else share).backward()
        return share.detach()

    def _update(self, loss: float, tokens: float, learning_rate: float) -> StepOutcome:
        gradients = self._gradients()
        scale = self.scaler.scale
        norm = float(torch.nn.utils.get_total_norm(gradients)) / scale
        overflowed = not math.isfinite(norm) or not math.isfinite(loss)
        self.scaler.update(overflowed)
        if overflowed:
            return StepOutcome(loss, norm, tokens, updated=False)
        factor = clip_factor(norm, self.clip_grad) / scale
        if factor != 1.0:
            scale_all_(gradients, factor)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.weights.publish()
        return StepOutcome(loss, norm, tokens, updated=True)

    def _gradients(self) -> list[Tensor]:
        """The gradients of the whole batch, summed over data-parallel ranks."""
        if self.ctx.dp_cp.size > 1:
            # A parameter that this rank's samples did not reach still takes part in the sum.
            for _, parameter in self.weights.named_parameters():
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for _, p in self.weights.named_parameters() if p.grad is not None]
        sum_gradients(gradients, self.ctx.dp_cp)
        return gradients


def clip_factor(norm: float, limit: float) -> float:
    """What gradients are multiplied by so that their global norm is at most `limit` (0: no limit)."""
    return min(limit / (norm + 1e-6), 1.0) if limit > 0.0 else 1.0


def masked_sum(losses: Tensor, mask: Tensor) -> Tensor:
    """Sum of losses where mask is 1. A masked position adds exactly 0, even if its loss is not finite."""
    return losses.masked_fill(mask == 0, 0.0).sum()
