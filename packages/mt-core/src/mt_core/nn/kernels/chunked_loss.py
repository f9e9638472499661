"""Linear projection and cross entropy without the logits: [T, H] x [V, H] -> losses, some tokens at a time.

Two forms, by what is known of the gradient. Any gradient of each loss: the backward pass computes the logits a
second time (4 matrix products). A weighted sum of the losses, weights known beforehand: the forward pass finishes
the gradients while it has the logits, and the backward pass only scales them (3 products).

hidden has to be what all ranks of the axis share, through `copy_to` or `gather_from`, whose backward adds up the
ranks' parts of its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.kernels.vocab_parallel import RowKernels, reduce_statistics
from mt_core.parallel.context import Axis

CHUNK_BYTES = 512 * 2**20
"""Of logits held at a time: enough rows for matrix products at full speed."""
ROW_MULTIPLE = 128


def rows_of_chunk(hidden: Tensor, weight: Tensor) -> int:
    """Tokens at a time: a multiple of 128 whose logits take at most CHUNK_BYTES, and at least 128."""
    rows = CHUNK_BYTES // max(len(weight) * hidden.element_size(), 1)
    return max(rows // ROW_MULTIPLE * ROW_MULTIPLE, ROW_MULTIPLE)


def chunked_losses(
    hidden: Tensor, weight: Tensor, columns: Tensor, axis: Axis, rows: RowKernels, chunk: int | None = None
) -> Tensor:
    """hidden [T, H], weight [V, H] of this rank, columns [T] as in cross_entropy -> losses [T] in fp32.

    Two reductions over the axis, of all tokens at once. chunk: tokens at a time.
    """
    return _ChunkedLosses.apply(hidden, weight, columns, axis, rows, chunk or rows_of_chunk(hidden, weight))


def chunked_weighted_sum(
    hidden: Tensor,
    weight: Tensor,
    columns: Tensor,
    loss_weights: Tensor,
    axis: Axis,
    rows: RowKernels,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """-> sum over tokens of loss_weights * loss, and the losses [T], which are not differentiable.

    loss_weights [T] in fp32, not differentiated. Two reductions over the axis for each chunk.
    """
    chunk = chunk or rows_of_chunk(hidden, weight)
    return _ChunkedWeightedSum.apply(hidden, weight, columns, loss_weights, axis, rows, chunk)


class _ChunkedLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, columns: Tensor, axis: Axis, rows: RowKernels, chunk: int
    ) -> Tensor:
        statistics = torch.empty(3, len(hidden), dtype=_wide(hidden), device=hidden.device)
        for part in _parts(len(hidden), chunk):
            statistics[:, part] = rows.statistics(F.linear(hidden[part], weight), columns[part])
        losses, lse = reduce_statistics(statistics, axis)
        ctx.save_for_backward(hidden, weight, columns, lse)
        ctx.rows, ctx.chunk = rows, chunk
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        hidden, weight, columns, lse = ctx.saved_tensors
        gradients = _Gradients(hidden, weight)
        for part in _parts(len(hidden), ctx.chunk):
            logits = F.linear(hidden[part], weight)
            ctx.rows.subtract_target_(logits, columns[part], lse[part], grads[0][part])
            gradients.add(part, logits)
        return gradients.hidden, gradients.weight, None, None, None, None


class _ChunkedWeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        columns: Tensor,
        loss_weights: Tensor,
        axis: Axis,
        rows: RowKernels,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        losses = torch.empty(len(hidden), dtype=_wide(hidden), device=hidden.device)
        gradients = _Gradients(hidden, weight)
        for part in _parts(len(hidden), chunk):
            logits = F.linear(hidden[part], weight)
            losses[part], lse = reduce_statistics(rows.statistics(logits, columns[part]), axis)
            rows.subtract_target_(logits, columns[part], lse, loss_weights[part])
            gradients.add(part, logits)
        ctx.gradients = gradients
        ctx.mark_non_differentiable(losses)
        return (losses * loss_weights).sum(), losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled where they stand, as a second gradient of the weight would cost what is saved on logits.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("a weighted sum of chunked losses has one backward pass; its gradients are used up")
        hidden, weight = gradients.hidden, gradients.weight
        return hidden.mul_(grads[0]), weight.mul_(grads[0]), None, None, None, None, None


class _Gradients:
    """Of hidden and weight, filled a chunk of logits' gradients at a time. The weight's is added up in its dtype."""

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        self._inputs, self._weight = hidden, weight
        self.hidden, self.weight = torch.empty_like(hidden), torch.zeros_like(weight)

    def add(self, part: slice, logits: Tensor) -> None:
        torch.mm(logits, self._weight, out=self.hidden[part])
        self.weight.addmm_(logits.T, self._inputs[part])


def _parts(length: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, length)) for start in range(0, length, chunk))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
