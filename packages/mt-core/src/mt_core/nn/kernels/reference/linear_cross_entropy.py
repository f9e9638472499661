"""The output projection and its cross entropy in one, with torch's kernels on the rows."""

from __future__ import annotations

from torch import Tensor

from mt_core.nn.kernels.chunked_loss import chunked_losses, chunked_weighted_sum
from mt_core.nn.kernels.reference.cross_entropy import ROWS
from mt_core.parallel.context import Axis


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
