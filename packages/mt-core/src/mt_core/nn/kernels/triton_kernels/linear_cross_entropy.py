"""The output projection and its cross entropy in one, with our kernels on the rows."""

from __future__ import annotations

from torch import Tensor

from mt_core.nn.kernels.chunked_loss import chunked_losses, chunked_weighted_sum
from mt_core.nn.kernels.triton_kernels.cross_entropy import ROWS
from mt_core.parallel.context import Axis


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, columns: Tensor, axis: Axis, chunk: int | None = None, ids: int | None = None
) -> Tensor:
    """As mt_core.nn.kernels.reference.linear_cross_entropy."""
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
    """As mt_core.nn.kernels.reference.linear_cross_entropy."""
    return chunked_weighted_sum(hidden, weight, columns, loss_weights, axis, ROWS, chunk, ids)
