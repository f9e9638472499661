# mypy: disable-error-code="no-untyped-def"
"""LayerNorm, alone or with the sum of a residual stream: see rms_norm, which has the same passes over memory."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.kernels.triton_kernels.launch import WIDE_BLOCK, WIDE_WARPS, RowTiles, on_device, rows_of

WIDEST_FORWARD, WIDEST_BACKWARD = 16384, 8192
"""Columns that a program holds in registers; from the next power of two on they spill."""


@triton.jit
def _layer_norm_forward(
    x, branch, weight, bias, total, y, mean, rstd, rows, width, eps,
    ADD: tl.constexpr, ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ADD: of x + branch, which is rounded to total first."""
    # int64: offsets pass 2^31 for many rows.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    offsets = row[:, None] * width + column[None, :]
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        scale += 1.0
    shift = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(branch + offsets, mask=inside, other=0.0).to(tl.float32)
        # See _rms_norm_forward: the norm of the rounded sum.
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + offsets, rounded, mask=inside)
        value = rounded.to(tl.float32)
    average = tl.sum(value, 1) / width
    # The variance in a second pass over the registers: E[x^2] - E[x]^2 cancels where the mean is large beside the
    # deviation. Masked columns would be -average, not 0.
    centered = tl.where(inside, value - average[:, None], 0.0)
    # eps inside the root, the biased variance (divided by width), as torch.
    inverse = 1.0 / tl.sqrt(tl.sum(centered * centered, 1) / width + eps)
    tl.store(y + offsets, centered * inverse[:, None] * scale[None, :] + shift[None, :], mask=inside)
    tl.store(mean + row, average, mask=row < rows)
    tl.store(rstd + row, inverse, mask=row < rows)


@triton.jit
def _layer_norm_forward_by_columns(
    x, weight, bias, y, mean, rstd, width, eps, ZERO_CENTERED: tl.constexpr, BLOCK: tl.constexpr
):
    """Same as _layer_norm_forward, for a row wider than the registers: it is read again from the cache."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    # Three passes over a row, the last two from the cache: the mean, the variance around it, the result.
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    average = tl.sum(total, 0) / width
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
        centered = tl.where(column < width, value - average, 0.0)
        squares += centered * centered
    inverse = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + eps)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            scale += 1.0
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + row * width + column, (value - average) * inverse * scale + shift, mask=inside)
    tl.store(mean + row, average)
    tl.store(rstd + row, inverse)


@triton.jit
def _layer_norm_backward(
    dy, dtotal, x, weight, mean, rstd, dx, dweight, dbias, rows, width, tiles,
    ADD: tl.constexpr, ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dweight, dbias: [programs, width], what this program's rows add. ADD: dtotal is added to dx."""
    # x^ = (x - mean) rstd, g = dy w:  dw = sum of dy x^,  db = sum of dy,  dx = rstd (g - mean(g) - x^ mean(g x^))
    column = tl.arange(0, BLOCK)
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        scale += 1.0
    # Over the rows of this program, as in _rms_norm_backward.
    weight_total = tl.zeros([BLOCK], tl.float32)
    bias_total = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64) * tiles * ROWS
    for tile in range(tiles):
        row = first + tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        offsets = row[:, None] * width + column[None, :]
        average = tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
        inverse = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
        # [ROWS, BLOCK]; masked places would hold -average * inverse.
        normed = tl.where(inside, (value - average) * inverse, 0.0)
        grad = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
        weight_total += tl.sum(grad * normed, 0)
        bias_total += tl.sum(grad, 0)
        grad *= scale[None, :]
        along = (tl.sum(grad * normed, 1) / width)[:, None]
        level = (tl.sum(grad, 1) / width)[:, None]
        change = inverse * (grad - level - normed * along)
        if ADD:
            change += tl.load(dtotal + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + offsets, change, mask=inside)
    place = tl.program_id(0).to(tl.int64) * width + column
    tl.store(dweight + place, weight_total, mask=column < width)
    tl.store(dbias + place, bias_total, mask=column < width)


@triton.jit
def _layer_norm_backward_by_columns(
    dy, x, weight, mean, rstd, dx, dweight, dbias, rows, width, tiles,
    ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Same as _layer_norm_backward, for rows wider than the registers: each is read again from the cache."""
    first = tl.program_id(0).to(tl.int64) * tiles * ROWS
    for tile in range(tiles):
        row = first + tile * ROWS + tl.arange(0, ROWS)
        average = tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
        inverse = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        # First pass: means of g x^ and of g. dy is masked to 0, so x^ needs no mask here.
        along = tl.zeros([ROWS, BLOCK], tl.float32)
        level = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = (row < rows)[:, None] & (column < width)[None, :]
            offsets = row[:, None] * width + column[None, :]
            scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
            if ZERO_CENTERED:
                scale += 1.0
            normed = (tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) - average) * inverse
            grad = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32) * scale[None, :]
            along += grad * normed
            level += grad
        along_mean = (tl.sum(along, 1) / width)[:, None]
        level_mean = (tl.sum(level, 1) / width)[:, None]
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = (row < rows)[:, None] & (column < width)[None, :]
            offsets = row[:, None] * width + column[None, :]
            scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
            if ZERO_CENTERED:
                scale += 1.0
            normed = (tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) - average) * inverse
            grad = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
            change = inverse * (grad * scale[None, :] - level_mean - normed * along_mean)
            tl.store(dx + offsets, change, mask=inside)
            place = tl.program_id(0).to(tl.int64) * width + column
            # The first tile overwrites memory that was not zeroed; later ones add to it.
            later = (column < width) & (tile > 0)
            weight_total = tl.load(dweight + place, mask=later, other=0.0) + tl.sum(grad * normed, 0)
            bias_total = tl.load(dbias + place, mask=later, other=0.0) + tl.sum(grad, 0)
            tl.store(dweight + place, weight_total, mask=column < width)
            tl.store(dbias + place, bias_total, mask=column < width)


def _normalize(
    rows: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> what was normalized (rows + branch), y, mean and 1 / sqrt(variance + eps) of each row."""
    height, width = rows.shape
    if width > WIDEST_FORWARD and branch is not None:
        rows, branch = (rows + branch).to(rows.dtype), None
    y = torch.empty_like(rows)
    total = rows if branch is None else torch.empty_like(rows)
    mean, rstd = torch.empty(2, height, dtype=torch.float32, device=rows.device)  # [rows] each
    if rows.numel():
        with on_device(rows):
            if width > WIDEST_FORWARD:
                _layer_norm_forward_by_columns[(height,)](
                    rows, weight, bias, y, mean, rstd, width, eps, zero_centered, WIDE_BLOCK, num_warps=WIDE_WARPS
                )
            else:
                tiles = RowTiles.of(rows, len(weight))
                _layer_norm_forward[(tiles.count,)](
                    rows, rows if branch is None else branch, weight, bias, total, y, mean, rstd, height, width, eps,
                    branch is not None, zero_centered, tiles.rows, tiles.block, num_warps=tiles.warps,
                )  # fmt: skip
    return total, y, mean, rstd


def _gradients(
    dy: Tensor, dtotal: Tensor | None, saved: tuple[Tensor, ...], zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """saved: rows, weight, bias, mean, rstd. -> dx, with dtotal added, dweight and dbias"""
    rows, weight, bias, mean, rstd = saved
    dx = torch.empty_like(rows)
    if rows.shape[1] > WIDEST_BACKWARD:
        dweight, dbias = _wide_gradients(dx, dy.contiguous(), rows, weight, mean, rstd, zero_centered)
        dx = dx if dtotal is None else dx.add_(dtotal.reshape(dx.shape))
    else:
        dweight, dbias = _narrow_gradients(dx, dy.contiguous(), dtotal, rows, weight, mean, rstd, zero_centered)
    return dx.view(dy.shape), dweight.to(weight.dtype), dbias.to(bias.dtype)


def _narrow_gradients(
    dx: Tensor,
    dy: Tensor,
    dtotal: Tensor | None,
    rows: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    zero_centered: bool,
) -> Tensor:
    """Writes dx. -> [2, width] fp32, dweight and dbias"""
    tiles = RowTiles.of(rows, len(weight))
    # [2, programs, width]: dweight and dbias of each program
    parts = torch.empty(2, tiles.programs, rows.shape[1], dtype=torch.float32, device=rows.device)
    if rows.numel():
        with on_device(rows):
            _layer_norm_backward[(tiles.programs,)](
                dy, dy if dtotal is None else dtotal.contiguous(), rows, weight, mean, rstd, dx, parts[0], parts[1],
                *rows.shape, tiles.per_program, dtotal is not None, zero_centered, tiles.rows, tiles.block,
                num_warps=tiles.warps,
            )  # fmt: skip
    return parts.sum(1)


def _wide_gradients(
    dx: Tensor, dy: Tensor, rows: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, zero_centered: bool
) -> Tensor:
    """Same as _narrow_gradients, without dtotal: there are no registers for it."""
    tiles = RowTiles.by_columns(rows)
    parts = torch.empty(2, tiles.programs, rows.shape[1], dtype=torch.float32, device=rows.device)
    if rows.numel():
        with on_device(rows):
            _layer_norm_backward_by_columns[(tiles.programs,)](
                dy, rows, weight, mean, rstd, dx, parts[0], parts[1], *rows.shape, tiles.per_program, zero_centered,
                tiles.rows, tiles.block, num_warps=tiles.warps,
            )  # fmt: skip
    return parts.sum(1)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool) -> Tensor:
        rows, y, mean, rstd = _normalize(rows_of(x), None, weight, bias, eps, zero_centered)
        ctx.save_for_backward(rows, weight, bias, mean, rstd)
        ctx.zero_centered = zero_centered
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        return *_gradients(grads[0], None, ctx.saved_tensors, ctx.zero_centered), None, None


class _AddLayerNorm(torch.autograd.Function):
    """Same as _AddRMSNorm, for LayerNorm."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool
    ) -> tuple[Tensor, Tensor]:
        rows = None if branch is None else rows_of(branch)
        total, y, mean, rstd = _normalize(rows_of(x), rows, weight, bias, eps, zero_centered)
        ctx.save_for_backward(total, weight, bias, mean, rstd)
        ctx.zero_centered, ctx.branch_dtype = zero_centered, None if branch is None else branch.dtype
        ctx.set_materialize_grads(False)
        return x if branch is None else total.view(x.shape), y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dtotal, dy = grads
        dx, dweight, dbias = dtotal, None, None
        if dy is not None:
            dx, dweight, dbias = _gradients(dy, dtotal, ctx.saved_tensors, ctx.zero_centered)
        dbranch = None if dx is None or ctx.branch_dtype is None else dx.to(ctx.branch_dtype)
        return dx, dbranch, dweight, dbias, None, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """Same as mt_core.nn.kernels.reference.layers.layer_norm."""
    return _LayerNorm.apply(x, weight.contiguous(), bias.contiguous(), eps, zero_centered)


def add_layer_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """(x + branch in x's dtype, layer_norm of that); see `fused` in the catalogue."""
    outputs: tuple[Tensor, Tensor] = _AddLayerNorm.apply(
        x, branch, weight.contiguous(), bias.contiguous(), eps, zero_centered
    )
    return outputs
