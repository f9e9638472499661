"""Cross entropy of logits that may be sharded over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from mt_core.nn.kernels.chunked_loss import chunked_losses, chunked_weighted_sum
from mt_core.nn.kernels.reference.layers import widened
from mt_core.nn.kernels.vocab_parallel import RowKernels, cross_entropy_by, reduce_statistics
from mt_core.parallel.context import Axis

CPU_BLOCK_ELEMENTS = 2**18
"""Elements of logits that are worked on at a time: 1 MiB in fp32."""


def cross_entropy(logits: Tensor, columns: Tensor, axis: Axis, overwrite: bool = False) -> Tensor:
    """-log softmax(logits)[column]: logits [T, V] of this rank, columns [T] -> losses [T] in fp32 or wider.

    columns: of this rank's V, negative or V and more on ranks that do not hold the label. Two small reductions over
    the axis. The gradient is in logits' dtype. overwrite: the backward pass may put it where the logits stand, which
    the caller does not look at again; then there is one backward pass only.
    """
    return cross_entropy_by(ROWS, logits, columns, axis, overwrite)


def statistics(logits: Tensor, columns: Tensor, ids: int) -> Tensor:
    """Implements RowKernels."""
    wide = widened(logits[:, :ids])
    if wide.shape[1] == 0:
        return _statistics_of_padding(wide)
    largest = wide.amax(1)  # [T]
    blocks = zip(_row_blocks(wide), _row_blocks(largest[:, None], wide), strict=True)
    # In blocks, as rows - top and exp are temporaries of the logits' size otherwise.
    sums = torch.cat([(rows - top).exp_().sum(1) for rows, top in blocks])
    return torch.stack((largest, sums, _logits_of_labels(wide, columns)))


def _statistics_of_padding(logits: Tensor) -> Tensor:
    """Statistics of a rank whose shard of the vocabulary is padding alone: m = -inf, s = y = 0. logits: [T, 0]."""
    # The rank takes part in the reductions all the same.
    empty = logits.new_zeros(3, len(logits))
    empty[0] = float("-inf")
    return empty


def _logits_of_labels(logits: Tensor, columns: Tensor) -> Tensor:
    """[T], 0 where the label is another rank's."""
    here, safe = _inside(columns, logits.shape[1])
    # gather needs a valid index on every rank; what it reads elsewhere is masked.
    return logits.gather(1, safe[:, None])[:, 0].masked_fill(~here, 0.0)


def subtract_target_(logits: Tensor, columns: Tensor, lse: Tensor, factor: Tensor, ids: int) -> None:
    """Implements RowKernels."""
    if ids < logits.shape[1]:
        logits[:, ids:] = 0.0
        logits = logits[:, :ids]
    if logits.shape[1] == 0:
        return
    here, safe = _inside(columns, logits.shape[1])
    target = -here.to(lse.dtype)  # -1 where the label is this rank's, else 0
    per_row = [_row_blocks(values[:, None], logits) for values in (lse, safe, target, factor)]
    for rows, *values in zip(_row_blocks(logits), *per_row, strict=True):
        _subtract_target_of_block_(rows, *values)


def _subtract_target_of_block_(logits: Tensor, lse: Tensor, column: Tensor, target: Tensor, factor: Tensor) -> None:
    """lse, column, target, factor: [T, 1]"""
    wide = widened(logits)
    # In fp32 the logits are overwritten; in 16 bits a block in fp32 is computed and copied back.
    gradient = wide.sub_(lse) if wide is logits else wide - lse
    # factor * (exp(z - lse) - [column])
    gradient.exp_().scatter_add_(1, column, target.to(gradient.dtype)).mul_(factor)
    if wide is not logits:
        logits.copy_(gradient)


def _exponentials_(logits: Tensor, columns: Tensor) -> Tensor:
    """`statistics` of logits [T, V] in fp32 or wider, which become exp(z - m)."""
    if logits.shape[1] == 0:
        return _statistics_of_padding(logits)
    labels = _logits_of_labels(logits, columns)
    largest, sums = zip(*map(_exponentials_of_block_, _row_blocks(logits)), strict=True)
    return torch.stack((torch.cat(largest), torch.cat(sums), labels))


def _exponentials_of_block_(logits: Tensor) -> tuple[Tensor, Tensor]:
    """m and s, both [T]."""
    largest = logits.amax(1)
    return largest, logits.sub_(largest[:, None]).exp_().sum(1)


def _row_blocks(x: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Rows of x in blocks, on a CPU so few that those of `like` (by default of x) stay in its cache between passes."""
    like = x if like is None else like
    if like.device.type != "cpu":
        return (x,)
    return x.split(max(CPU_BLOCK_ELEMENTS // like.shape[1], 1))


def _inside(columns: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Whether a column is one of this rank's, and an index that is safe where it is not."""
    return (columns >= 0) & (columns < width), columns.clamp(0, width - 1)


class _OneExponential(RowKernels):
    """With one exponential of a logit, rather than two, where logits are as wide as the result."""

    def loss_and_gradient_(self, logits: Tensor, columns: Tensor, factor: Tensor, axis: Axis, ids: int) -> Tensor:
        # In 16 bits the exponentials would be rounded before they are scaled.
        if widened(logits) is not logits:
            return super().loss_and_gradient_(logits, columns, factor, axis, ids)
        if ids < logits.shape[1]:
            logits[:, ids:] = 0.0  # the gradient of padding
        exponentials = logits[:, :ids]
        rank_statistics = _exponentials_(exponentials, columns)
        largest = rank_statistics[0].clone()  # of this rank; the reduction puts that of all ranks in its place
        losses, lse = reduce_statistics(rank_statistics, axis)
        _gradient_of_exponentials_(exponentials, columns, (largest - lse).exp(), factor)
        return losses


def _gradient_of_exponentials_(exponentials: Tensor, columns: Tensor, scale: Tensor, factor: Tensor) -> None:
    """[T, V]: exp(z - m) become factor * (exp(z - m) * scale - [column]). scale [T]: exp(m - lse)."""
    if exponentials.shape[1] == 0:
        return
    here, safe = _inside(columns, exponentials.shape[1])
    exponentials.mul_((factor * scale)[:, None])
    exponentials.scatter_add_(1, safe[:, None], factor.neg().masked_fill(~here, 0.0)[:, None])


ROWS = _OneExponential(statistics, subtract_target_)


# -- the output projection and its cross entropy in one ---------------------------------------------------


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, columns: Tensor, axis: Axis, chunk: int | None = None, ids: int | None = None
) -> Tensor:
    """Cross entropy of hidden W^T: hidden [T, H], weight [V, H] of this rank, columns [T] -> losses [T].

    ids: rows of weight that stand for ids; those behind them are padding. Default: all.
    """
    return chunked_losses(hidden, weight, columns, axis, ROWS, chunk, ids)


def linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    columns: Tensor,
    loss_weights: Tensor,
    axis: Axis,
    chunk: int | None = None,
    ids: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Their sum weighted by loss_weights [T], and the losses [T] for the log; see chunked_weighted_sum."""
    return chunked_weighted_sum(hidden, weight, columns, loss_weights, axis, ROWS, chunk, ids)
