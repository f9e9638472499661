"""Losses on hidden states and the LM head weight, which never materialize all logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.embedding import VocabRange, without_padding
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.kernels.reference.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_sum
from mt_core.nn.kernels.request import Feature
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.nn.loss import seen_labels
from mt_core.parallel.collectives import copy_to, gather_from
from mt_core.parallel.context import ParallelContext


@dataclass(frozen=True)
class Unprojected:
    """The operands of the logits: hidden [B, S, H] (S sharded with sequence parallelism), weight [rows of this rank,
    H], of which the first stand for the ids `own` and the others are padding."""

    hidden: Tensor
    weight: Tensor
    own: VocabRange
    ctx: ParallelContext

    def rows(self) -> Tensor:
        """[B * S, H] of the whole sequence; the gradient is summed over the ranks of the vocabulary."""
        tp, x = self.ctx.tp, self.hidden
        if tp.size > 1:
            # Either way the backward pass adds up the ranks' gradients: each rank has other columns.
            x = gather_from(x, SEQUENCE_DIM, tp) if self.ctx.sequence_parallel else copy_to(x, tp)
        return x.flatten(0, -2)

    def matrix(self) -> Tensor:
        """What hidden is multiplied by. Kernels of a GPU are slow for numbers of columns that are not aligned, so that
        padding is multiplied too; a CPU leaves it out, since here the backward pass would multiply it twice more."""
        return self.weight if self.weight.is_cuda else without_padding(self.weight, self.own)

    def columns(self, batch: Mapping[str, Tensor]) -> Tensor:
        """[B * S]: the rows of `weight` that labels stand for; outside of it for those of other ranks."""
        return seen_labels(batch).flatten() - self.own.start  # negative or too large on other ranks


class LinearCrossEntropy:
    """The losses of cross_entropy, any gradient; the backward pass computes each chunk of logits again."""

    model_options: Mapping[str, Any] = {"project": False}
    """Arguments that the model's forward gets for this loss."""

    def __init__(self, parallel: ParallelContext) -> None:
        self.tp = parallel.tp
        self.kernel: Callable[..., Tensor] = linear_cross_entropy

    def use_kernels(self, kernels: Kernels) -> None:
        self.kernel = kernels.pick("linear_cross_entropy", *_features(self.tp.size))

    def __call__(self, output: Unprojected, batch: Mapping[str, Tensor]) -> Tensor:
        ids = len(output.own)
        losses = self.kernel(output.rows(), output.matrix(), output.columns(batch), self.tp, ids=ids)
        return losses.view(batch["labels"].shape)


class LinearCrossEntropySum:
    """The same losses, with gradients made in the forward pass, for their sum weighted by loss_mask.

    Only a multiple of that sum can be differentiated, which is what the trainer does: the gradient of each loss has to
    be its weight times the same number. Without gradients (evaluation) the losses alone are computed, in one product.
    """

    model_options: Mapping[str, Any] = {"project": False}

    def __init__(self, parallel: ParallelContext) -> None:
        self.tp = parallel.tp
        self.losses_alone = LinearCrossEntropy(parallel)
        self.kernel: Callable[..., tuple[Tensor, Tensor]] = linear_cross_entropy_sum

    def use_kernels(self, kernels: Kernels) -> None:
        self.losses_alone.use_kernels(kernels)
        self.kernel = kernels.pick("linear_cross_entropy_sum", *_features(self.tp.size))

    def __call__(self, output: Unprojected, batch: Mapping[str, Tensor]) -> Tensor:
        if not torch.is_grad_enabled():
            return self.losses_alone(output, batch)
        # The weights of the sum. What the trainer divides by is part of the gradient that arrives.
        weights = batch["loss_mask"].flatten().float()
        ids = len(output.own)
        total, losses = self.kernel(output.rows(), output.matrix(), output.columns(batch), weights, self.tp, ids=ids)
        return _LossesOfSum.apply(total, losses, weights).view(batch["labels"].shape)


class _LossesOfSum(torch.autograd.Function):
    """(weighted sum of losses, losses) -> losses, whose gradients are their weights times that of the sum."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, losses: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        # clone: an input that a Function returns unchanged becomes a view of that input.
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (weights,) = ctx.saved_tensors
        # The gradient of the sum is that of any loss over its weight; the largest weight is farthest from 0. All may be
        # 0: then every gradient is.
        largest = weights.argmax()
        # take() and not an index, for which the host would wait.
        return grads[0].take(largest) / weights.take(largest).clamp(min=torch.finfo(weights.dtype).tiny), None, None


def _features(ranks: int) -> tuple[Feature, ...]:
    return ("parallel",) if ranks > 1 else ()


def build_linear_cross_entropy(config: Config, parallel: ParallelContext) -> LinearCrossEntropy:
    _require_weights_outside(config)
    return LinearCrossEntropy(parallel)


def build_linear_cross_entropy_sum(config: Config, parallel: ParallelContext) -> LinearCrossEntropySum:
    _require_weights_outside(config)
    return LinearCrossEntropySum(parallel)


def _require_weights_outside(config: Config) -> None:
    """FSDP2 unshards a weight for the forward call of its module only, and the loss runs outside of it."""
    if config.parallel.use_torch_fsdp2:
        raise ConfigError(
            f"train.loss={config.train.loss} multiplies with the LM head after the model's forward pass, where "
            "parallel.use_torch_fsdp2=true has divided it again; use train.loss=cross_entropy, or "
            "parallel.use_distributed_optimizer=true in place of FSDP2"
        )
