"""Losses: one number for each position, which the trainer multiplies by its weight, sums and divides (see
mt_core.data.loss_weights)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.embedding import VocabRange, padded_vocab_size, without_padding
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.kernels.reference.cross_entropy import linear_cross_entropy, linear_cross_entropy_sum
from mt_core.nn.kernels.request import Feature
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.parallel.collectives import copy_to, gather_from
from mt_core.parallel.context import Axis, ParallelContext
from mt_core.parallel.reductions import all_reduce_

Loss = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""(model output, batch) -> losses [batch, sequence] in fp32"""


@runtime_checkable
class ReportsEvaluation(Protocol):
    """A loss with metrics of its own for validation sets. It collects them while gradients are disabled."""

    def take_metrics(self) -> Mapping[str, float]:
        """Means over the batches of all ranks since the last call. Collective over data-parallel ranks."""
        ...


@runtime_checkable
class ReportsTraining(Protocol):
    """A loss with metrics of its own for training, which it collects while gradients are enabled."""

    def take_recorded(self) -> Iterable[tuple[str, float, Literal["mean", "sum", "max", "min"]]]:
        """(name, value, reduction) of this rank since the last call, for `run.record`; at each line of the log, on all
        ranks. Ranks without the last pipeline stage have none. Not collective."""
        ...


def cross_entropy(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """-log softmax(logits)[label] at each position, in fp32. logits: [batch, sequence, vocab].

    Where loss_mask is 0 the label may be anything, also negative.
    """
    labels = batch["labels"]
    # No division: the trainer divides by the number of unmasked tokens over all ranks and micro-batches.
    flat = F.cross_entropy(logits.float().flatten(0, -2), seen_labels(batch).flatten(), reduction="none")
    return flat.view(labels.shape)


def vocab_parallel_cross_entropy(first_id: int, axis: Axis) -> Loss:
    """The same with logits sharded over the vocabulary: [batch, sequence, ids of this rank], never gathered.

    first_id: the id that this rank's first column stands for.
    """

    def loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return _VocabParallelCrossEntropy.apply(logits.float(), seen_labels(batch) - first_id, axis)

    return loss


def seen_labels(batch: Mapping[str, Tensor]) -> Tensor:
    """Labels with 0 where there is none (data sets put -1 or -100 there)."""
    return batch["labels"].clamp(min=0)


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """Sum of weight * loss. losses: of the shape of weights, or [], the weighted mean over the micro-batch.

    A position with weight 0 contributes exactly 0, even if its loss is not finite. Raises ConfigError for other shapes.
    """
    if losses.ndim == 0:
        # The mean over no position may be 0/0.
        return losses.masked_fill(~weights.any(), 0.0) * weights.sum()
    if losses.shape != weights.shape:
        raise ConfigError(
            f"the loss returned {list(losses.shape)} numbers for weights {list(weights.shape)} (loss_mask, or 1 for "
            "each row of a batch without it); it has to return one for each weight, or one scalar, the weighted mean"
        )
    return _WeightedSum.apply(losses, weights)


class _WeightedSum(torch.autograd.Function):
    """sum(weight * loss); the gradient of a loss is its weight, one kernel in place of those of each operation."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        # losses * weights alone would give NaN for an infinite loss at a position that is left out (inf * 0).
        return (losses.masked_fill(weights == 0, 0.0) * weights).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        return grads[0] * weights, None


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """Sum of weight * loss over the sum of the weights of a micro-batch; 0 where there is none."""
    total = weights.sum()
    return weighted_sum(losses, weights) / total.where(total > 0, 1.0)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Three reductions of one number a position: largest logit, sum of exponentials, logit of the label."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, columns: Tensor, axis: Axis) -> Tensor:
        """columns [B, S]: the label's column on this rank, outside of [0, columns) on the others."""
        # A rank may hold padding alone: 0 columns. It takes part in the collectives all the same.
        largest = logits.amax(-1) if logits.shape[-1] else logits.new_full(columns.shape, float("-inf"))
        all_reduce_(largest, axis, "max")  # [B, S]
        exponentials = (logits - largest[..., None]).exp()
        # [2, B, S]: the normalizer, and the label's logit on the rank that has it
        sums = torch.stack((exponentials.sum(-1), _logit_of(logits - largest[..., None], columns)))
        all_reduce_(sums, axis)
        # In place: the softmax of this rank's columns.
        ctx.save_for_backward(exponentials.div_(sums[0][..., None]), columns)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        probabilities, columns = ctx.saved_tensors
        width = probabilities.shape[-1]
        grad = probabilities * grads[0][..., None]
        if width:
            here = (columns >= 0) & (columns < width)
            # d loss / d z = softmax - [column is the label]; on other ranks `here` makes it - 0.
            grad.scatter_add_(-1, columns.clamp(0, width - 1)[..., None], -(grads[0] * here)[..., None])
        return grad, None, None


def _logit_of(logits: Tensor, labels: Tensor) -> Tensor:
    """logits[..., label] where the label is one of the columns, else 0."""
    columns = logits.shape[-1]
    if columns == 0:
        return torch.zeros(labels.shape, dtype=logits.dtype, device=logits.device)
    here = (labels >= 0) & (labels < columns)
    return logits.gather(-1, labels.clamp(0, columns - 1)[..., None])[..., 0].masked_fill(~here, 0.0)


class CrossEntropy:
    """cross_entropy or vocab_parallel_cross_entropy, until `use_kernels` picks a kernel for them."""

    def __init__(self, first_id: int, axis: Axis) -> None:
        self.first_id, self.axis = first_id, axis
        self.loss: Loss = cross_entropy if axis.size == 1 else vocab_parallel_cross_entropy(first_id, axis)

    def __call__(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return self.loss(logits, batch)

    def use_kernels(self, kernels: Kernels) -> None:
        features: tuple[Feature, ...] = ("parallel",) if self.axis.size > 1 else ()
        kernel = kernels.pick("cross_entropy", *features, plain=self.loss)
        # Where torch is chosen, `pick` gives back the plain form.
        if kernel is not self.loss:
            self.loss = self._with(kernel)

    def _with(self, kernel: Callable[..., Tensor]) -> Loss:
        def loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
            columns = seen_labels(batch) - self.first_id
            return kernel(logits.flatten(0, -2), columns.flatten(), self.axis).view(columns.shape)

        return loss


def build_cross_entropy(config: Config, parallel: ParallelContext | None = None) -> Loss:
    if parallel is None:
        return cross_entropy
    return CrossEntropy(first_id_of_rank(config, parallel), parallel.tp)


def first_id_of_rank(config: Config, parallel: ParallelContext) -> int:
    """The id that the first row of this rank's token embeddings stands for."""
    model = config.model
    assert model.vocab_size is not None  # filled in from the tokenizer
    padded = padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by * parallel.tp.size)
    return parallel.tp.rank * padded // parallel.tp.size


# -- losses on hidden states and the LM head weight, which never materialize all logits -------------------


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
    On a CPU positions of weight 0 are not projected, and their losses are 0.
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
        rows, columns = output.rows(), output.columns(batch)
        counted = counted_rows(weights)
        if counted is None:
            losses = self._losses(output, rows, columns, weights)
        else:
            some = self._losses(output, rows.index_select(0, counted), columns[counted], weights[counted])
            losses = some.new_zeros(len(weights)).index_copy(0, counted, some)
        return losses.view(batch["labels"].shape)

    def _losses(self, output: Unprojected, rows: Tensor, columns: Tensor, weights: Tensor) -> Tensor:
        """rows [T, H], columns [T], weights [T] -> losses [T]"""
        total, losses = self.kernel(rows, output.matrix(), columns, weights, self.tp, ids=len(output.own))
        return _LossesOfSum.apply(total, losses, weights)


MOST_COUNTED = 7 / 8
"""Share of positions that count, above which rows of hidden are not copied to leave out the others."""


def counted_rows(weights: Tensor) -> Tensor | None:
    """[n] int64, the positions whose loss counts, where leaving out the others saves work; None: take all.

    Tensor-parallel ranks have the same positions and weights, and so the same answer. On a GPU the host would have to
    wait for the number of them.
    """
    if weights.device.type != "cpu" or len(weights) == 0:
        return None
    counted = weights.nonzero().flatten()
    if len(counted) > MOST_COUNTED * len(weights):
        return None
    # At least one, whose weight may be 0: of no rows there is no largest weight.
    return counted if len(counted) else counted.new_zeros(1)


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
