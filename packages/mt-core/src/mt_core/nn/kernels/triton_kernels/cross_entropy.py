# mypy: disable-error-code="no-untyped-def"
"""Cross entropy: forward reads the logits once (online softmax), backward turns them into their gradient in place."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.kernels.chunked_loss import chunked_losses, chunked_weighted_sum
from mt_core.nn.kernels.triton_kernels.launch import on_device
from mt_core.nn.kernels.vocab_parallel import RowKernels, reduce_statistics
from mt_core.parallel.context import Axis

# Columns of a program that writes gradients.
_BLOCK = 4096
_DEPTH, _LANES = 4, 2048
_WARPS = 8


@triton.jit
def _cross_entropy_statistics(logits, columns, result, rows, width, padded, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    """result [3, rows]: largest logit, sum of exponentials, logit of the column. logits: [rows, padded], of which
    the first width > 0 columns count. What is loaded ends at `padded`, which may be aligned where width is not."""
    # int64: row * padded passes 2^31 from 16384 tokens of 131072 ids on.
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * padded
    # A running maximum and sum for each lane, over the DEPTH numbers that it loads at once: 1 + 1 / DEPTH exponentials
    # a number. Lanes meet after the last block.
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, DEPTH * BLOCK):
        column = first + tl.arange(0, DEPTH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # [DEPTH, BLOCK]
        # The load's mask ends at `padded`, which is aligned where rows have gaps, so that it stays vectorized; padding
        # is hidden afterwards.
        value = tl.load(start + column, mask=column < padded, other=float("-inf")).to(tl.float32)
        value = tl.where(column < width, value, float("-inf"))
        higher = tl.maximum(largest, tl.max(value, 0))
        # A lane behind the last column has seen nothing yet: exp(-inf - 0) = 0 instead of exp(-inf - -inf) = NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        # Rescale what was summed with the earlier maximum, then add the new numbers.
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(value - base[None, :]), 0)
        largest = higher
    # Lanes have maxima of their own; one more rescaling brings their sums to the row's.
    peak = tl.max(largest, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    target = tl.load(columns + row)
    # A label of another rank: y = 0 here, which the sum over ranks leaves as it is.
    here = (target >= 0) & (target < width)
    tl.store(result + row, peak)
    tl.store(result + rows + row, tl.sum(total * tl.exp(largest - base), 0))
    tl.store(result + 2 * rows + row, tl.load(start + target, mask=here, other=0.0).to(tl.float32))


@triton.jit
def _cross_entropy_gradient(logits, gradient, columns, lse, factor, width, padded, BLOCK: tl.constexpr):
    """gradient [rows, padded] in its own dtype: factor * (exp(logit - lse) - [column]), and 0 from `width` on. lse and
    factor: [rows]."""
    # d loss / d z_j = exp(z_j - lse) - [j is the label]. Each program reads the block that it writes and nothing else,
    # so gradient may be logits.
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offset = row * padded + column
    value = tl.load(logits + offset, mask=column < padded, other=0.0).to(tl.float32)
    probability = tl.exp(value - tl.load(lse + row))
    # A label of another rank may equal the number of a padding column here; the next line clears padding.
    hit = tl.where(column == tl.load(columns + row), 1.0, 0.0)
    result = tl.where(column < width, (probability - hit) * tl.load(factor + row), 0.0)
    tl.store(gradient + offset, result, mask=column < padded)


def statistics(logits: Tensor, columns: Tensor, ids: int) -> Tensor:
    """Implements RowKernels."""
    rows, padded = logits.shape
    result = torch.zeros(3, rows, dtype=torch.float32, device=logits.device)
    if ids == 0:
        result[0] = float("-inf")
    elif rows:
        with on_device(logits):
            _cross_entropy_statistics[(rows,)](
                logits, columns, result, rows, ids, padded, _DEPTH, _LANES, num_warps=_WARPS
            )
    return result


def subtract_target_(logits: Tensor, columns: Tensor, lse: Tensor, factor: Tensor, ids: int) -> None:
    """Implements RowKernels."""
    _gradient_into(logits, logits, columns, lse, factor, ids)


def _gradient_into(gradient: Tensor, logits: Tensor, columns: Tensor, lse: Tensor, factor: Tensor, ids: int) -> None:
    # rows on the first dimension of the grid: CUDA limits the second to 65,535.
    rows, padded = logits.shape
    if rows and padded:
        grid = (rows, triton.cdiv(padded, _BLOCK))
        with on_device(logits):
            _cross_entropy_gradient[grid](
                logits, gradient, columns, lse, factor.contiguous(), ids, padded, _BLOCK, num_warps=_WARPS
            )


ROWS = RowKernels(statistics, subtract_target_)


def _with_gaps(logits: Tensor) -> Tensor:
    """logits [rows, ids] with what lies between one row and the next in memory, [rows, ids or more], contiguous."""
    # The last row may end where the storage ends, without a gap behind it; then a view of whole rows would pass the
    # end.
    rows, pitch = len(logits), logits.stride(0)
    # Elements of the storage from the first logit on.
    held = logits.untyped_storage().nbytes() // logits.element_size() - logits.storage_offset()
    if logits.stride(1) != 1 or pitch <= logits.shape[1] or rows * pitch > held:
        return logits.contiguous()
    return logits.as_strided((rows, pitch), (pitch, 1))


class _CrossEntropy(torch.autograd.Function):
    """Logits whose rows are apart in memory are read as they are, and the rows of their gradient are as far apart, so
    that both stay aligned. Such logits may be a part of something else, and are not overwritten."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, columns: Tensor, axis: Axis, overwrite: bool) -> Tensor:
        rows, columns = _with_gaps(logits), columns.contiguous()
        ctx.ids = logits.shape[1]
        losses, lse = reduce_statistics(statistics(rows, columns, ctx.ids), axis)
        ctx.save_for_backward(rows, columns, lse)
        # Columns of the gap may belong to another tensor, so only rows without gaps are overwritten.
        ctx.overwrite = overwrite and rows.shape[1] == ctx.ids
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, columns, lse = ctx.saved_tensors
        gradient = logits if ctx.overwrite else torch.empty_like(logits)
        _gradient_into(gradient, logits, columns, lse, grads[0], ctx.ids)
        if ctx.overwrite:
            # Autograd does not see Triton's in-place write. With the version counter incremented, a backward pass that
            # saved the logits raises an error instead of using overwritten values.
            torch.autograd.graph.increment_version(logits)
        # The slice drops the gap, and keeps the aligned pitch for the product that reads the gradient.
        return gradient[:, : ctx.ids], None, None, None


def cross_entropy(logits: Tensor, columns: Tensor, axis: Axis, overwrite: bool = False) -> Tensor:
    """Same as the function of this name in mt_core.nn.kernels.reference.cross_entropy."""
    return _CrossEntropy.apply(logits, columns, axis, overwrite)


# -- the output projection and its cross entropy in one ---------------------------------------------------


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, columns: Tensor, axis: Axis, chunk: int | None = None, ids: int | None = None
) -> Tensor:
    """Same as the function of this name in mt_core.nn.kernels.reference.cross_entropy."""
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
    """Same as the function of this name in mt_core.nn.kernels.reference.cross_entropy."""
    return chunked_weighted_sum(hidden, weight, columns, loss_weights, axis, ROWS, chunk, ids)
