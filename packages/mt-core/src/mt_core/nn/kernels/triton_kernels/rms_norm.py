# mypy: disable-error-code="no-untyped-def"
"""RMSNorm. Forward reads x and writes y once; backward reads dy and x and writes dx once.

With a residual stream (`add_rms_norm`) the forward pass also adds a branch to it, and the backward pass the stream's
other gradient to dx, while the numbers are in registers.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.kernels.triton_kernels.launch import RowTiles, on_device, rows_of

WIDEST_SUM, WIDEST_BACKWARD = 16384, 8192
"""Columns that a program holds in registers, of a forward pass that adds and of a backward pass; from the next power of
two on they spill."""


@triton.jit
def _rms_norm_forward(
    x, branch, weight, total, y, rstd, rows, width, eps,
    ADD: tl.constexpr, ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ADD: of x + branch, which is rounded to total first."""
    # int64: rows * width passes 2^31 for 16384 tokens of 131072 columns.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]  # [ROWS, BLOCK]
    offsets = row[:, None] * width + column[None, :]
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        scale += 1.0
    # fp32 [ROWS, BLOCK]; masked columns are 0 and add nothing to the sum of squares.
    value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(branch + offsets, mask=inside, other=0.0).to(tl.float32)
        # The norm is that of the rounded sum, as with separate kernels. The backward pass reads `total`, so it starts
        # from the same numbers.
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + offsets, rounded, mask=inside)
        value = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 1) / width + eps)  # [ROWS]
    tl.store(y + offsets, value * inverse[:, None] * scale[None, :], mask=inside)
    tl.store(rstd + row, inverse, mask=row < rows)


@triton.jit
def _rms_norm_backward(
    dy, dtotal, x, weight, rstd, dx, dweight, rows, width, tiles,
    ADD: tl.constexpr, ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dweight: [programs, width], what this program's rows add. ADD: dtotal is added to dx."""
    # x^ = x rstd, g = dy w:  dw = sum over rows of dy x^,  dx = rstd (g - x^ mean(g x^))
    column = tl.arange(0, BLOCK)
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        scale += 1.0
    # Summed over this program's rows in registers and written once. Atomic additions to one dweight would depend on the
    # order in which programs end.
    total = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64) * tiles * ROWS
    for tile in range(tiles):
        row = first + tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        offsets = row[:, None] * width + column[None, :]
        # 0 for rows behind the last one: these add nothing to the sums.
        inverse = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) * inverse
        grad = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(grad * normed, 0)
        grad *= scale[None, :]
        mean = tl.sum(grad * normed, 1) / width
        change = inverse * (grad - normed * mean[:, None])  # [ROWS, BLOCK], dx
        if ADD:
            change += tl.load(dtotal + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + offsets, change, mask=inside)
    tl.store(dweight + tl.program_id(0).to(tl.int64) * width + column, total, mask=column < width)


@triton.jit
def _rms_norm_backward_by_columns(
    dy, dtotal, x, weight, rstd, dx, dweight, rows, width, tiles,
    ADD: tl.constexpr, ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Same as _rms_norm_backward, for rows wider than the registers: each is read again from the cache."""
    first = tl.program_id(0).to(tl.int64) * tiles * ROWS
    for tile in range(tiles):
        row = first + tile * ROWS + tl.arange(0, ROWS)
        inverse = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        # First pass over the columns: the mean of g x^. Sums for each lane, reduced once behind the loop.
        along = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = (row < rows)[:, None] & (column < width)[None, :]
            offsets = row[:, None] * width + column[None, :]
            scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
            if ZERO_CENTERED:
                scale += 1.0
            normed = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) * inverse
            along += tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32) * scale[None, :] * normed
        mean = (tl.sum(along, 1) / width)[:, None]
        # Second pass: x and dy come from the L2 cache, as a program has two rows at a time.
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = (row < rows)[:, None] & (column < width)[None, :]
            offsets = row[:, None] * width + column[None, :]
            scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
            if ZERO_CENTERED:
                scale += 1.0
            normed = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) * inverse
            grad = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
            change = inverse * (grad * scale[None, :] - normed * mean)
            if ADD:
                change += tl.load(dtotal + offsets, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx + offsets, change, mask=inside)
            place = dweight + tl.program_id(0).to(tl.int64) * width + column
            # The row of dweight does not fit in registers either, so it is added to in memory. The first tile
            # overwrites what is there: the memory is not zeroed before.
            before = tl.load(place, mask=(column < width) & (tile > 0), other=0.0)
            tl.store(place, before + tl.sum(grad * normed, 0), mask=column < width)


def _normalize(
    rows: Tensor, branch: Tensor | None, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """-> what was normalized (rows + branch), y, and 1 / sqrt(mean square + eps) of each row."""
    # The sum needs registers for a second row. torch adds, and the kernel without ADD reads the result.
    if branch is not None and rows.shape[1] > WIDEST_SUM:
        rows, branch = (rows + branch).to(rows.dtype), None
    tiles = RowTiles.of(rows, len(weight))
    # Without a branch `total` is `rows` itself and stays unwritten, as does the pointer that stands for `branch`.
    y = torch.empty_like(rows)
    total = rows if branch is None else torch.empty_like(rows)
    rstd = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    if rows.numel():
        with on_device(rows):
            _rms_norm_forward[(tiles.count,)](
                rows, rows if branch is None else branch, weight, total, y, rstd, *rows.shape, eps,
                branch is not None, zero_centered, tiles.rows, tiles.block, num_warps=tiles.warps,
            )  # fmt: skip
    return total, y, rstd


def _gradients(
    dy: Tensor, dtotal: Tensor | None, saved: tuple[Tensor, ...], zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """saved: rows, weight, rstd. -> dx, with dtotal added, and dweight"""
    rows, weight, rstd = saved
    is_wide = rows.shape[1] > WIDEST_BACKWARD
    tiles = RowTiles.by_columns(rows) if is_wide else RowTiles.of(rows, len(weight))
    kernel = _rms_norm_backward_by_columns if is_wide else _rms_norm_backward
    dx = torch.empty_like(rows)
    parts = torch.empty(tiles.programs, rows.shape[1], dtype=torch.float32, device=rows.device)  # [programs, width]
    if rows.numel():
        with on_device(rows):
            kernel[(tiles.programs,)](
                dy.contiguous(), dy if dtotal is None else dtotal.contiguous(), rows, weight, rstd, dx, parts,
                *rows.shape, tiles.per_program, dtotal is not None, zero_centered, tiles.rows, tiles.block,
                num_warps=tiles.warps,
            )  # fmt: skip
    # One reduction in a fixed order, so that a run can be repeated bit for bit.
    return dx.view(dy.shape), parts.sum(0).to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        rows, y, rstd = _normalize(rows_of(x), None, weight, eps, zero_centered)
        ctx.save_for_backward(rows, weight, rstd)
        ctx.zero_centered = zero_centered
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *_gradients(grads[0], None, ctx.saved_tensors, ctx.zero_centered), None, None


class _AddRMSNorm(torch.autograd.Function):
    """(x + branch, its norm); without a branch x itself, so that both of its gradients meet in one backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, zero_centered: bool
    ) -> tuple[Tensor, Tensor]:
        rows = None if branch is None else rows_of(branch)
        total, y, rstd = _normalize(rows_of(x), rows, weight, eps, zero_centered)
        ctx.save_for_backward(total, weight, rstd)
        ctx.zero_centered, ctx.branch_dtype = zero_centered, None if branch is None else branch.dtype
        # A layer may use one of the outputs only; None is then passed instead of zeros of the stream's size.
        ctx.set_materialize_grads(False)
        return x if branch is None else total.view(x.shape), y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # total = x + branch, y = norm(total): dx = dtotal + dnorm(dy), and dbranch is the same, total being a sum.
        dtotal, dy = grads
        # y was not used: only the gradient of the sum passes.
        dx, dweight = dtotal, None
        if dy is not None:
            dx, dweight = _gradients(dy, dtotal, ctx.saved_tensors, ctx.zero_centered)
        dbranch = None if dx is None or ctx.branch_dtype is None else dx.to(ctx.branch_dtype)
        return dx, dbranch, dweight, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """Same as mt_core.nn.kernels.reference.layers.rms_norm."""
    return _RMSNorm.apply(x, weight.contiguous(), eps, zero_centered)


def add_rms_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """(x + branch in x's dtype, rms_norm of that); see `fused` in the catalogue."""
    outputs: tuple[Tensor, Tensor] = _AddRMSNorm.apply(x, branch, weight.contiguous(), eps, zero_centered)
    return outputs
