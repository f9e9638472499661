# mypy: disable-error-code="no-untyped-def"
"""LayerNorm. Forward reads x and writes y once; backward reads dy and x and writes dx once."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.kernels.triton_kernels.launch import on_device
from mt_core.nn.kernels.triton_kernels.row_tiles import WIDE_BLOCK, WIDE_WARPS, RowTiles

WIDEST_FORWARD, WIDEST_BACKWARD = 16384, 8192
"""Columns that a program holds in registers; from the next power of two on they spill."""


@triton.jit
def _layer_norm_forward(
    x, weight, bias, y, mean, rstd, rows, width, eps,
    ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    offsets = row[:, None] * width + column[None, :]
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        scale += 1.0
    shift = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    average = tl.sum(value, 1) / width
    centered = tl.where(inside, value - average[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centered * centered, 1) / width + eps)
    tl.store(y + offsets, centered * inverse[:, None] * scale[None, :] + shift[None, :], mask=inside)
    tl.store(mean + row, average, mask=row < rows)
    tl.store(rstd + row, inverse, mask=row < rows)


@triton.jit
def _layer_norm_forward_by_columns(
    x, weight, bias, y, mean, rstd, width, eps, ZERO_CENTERED: tl.constexpr, BLOCK: tl.constexpr
):
    """As _layer_norm_forward, for a row wider than the registers: it is read again from the cache."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
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
    dy, x, weight, mean, rstd, dx, dweight, dbias, rows, width, tiles,
    ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dweight, dbias: [programs, width], what this program's rows add."""
    column = tl.arange(0, BLOCK)
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        scale += 1.0
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
        normed = tl.where(inside, (value - average) * inverse, 0.0)
        grad = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
        weight_total += tl.sum(grad * normed, 0)
        bias_total += tl.sum(grad, 0)
        grad *= scale[None, :]
        along = (tl.sum(grad * normed, 1) / width)[:, None]
        level = (tl.sum(grad, 1) / width)[:, None]
        tl.store(dx + offsets, inverse * (grad - level - normed * along), mask=inside)
    own = tl.program_id(0).to(tl.int64) * width + column
    tl.store(dweight + own, weight_total, mask=column < width)
    tl.store(dbias + own, bias_total, mask=column < width)


@triton.jit
def _layer_norm_backward_by_columns(
    dy, x, weight, mean, rstd, dx, dweight, dbias, rows, width, tiles,
    ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As _layer_norm_backward, for rows wider than the registers: each is read again from the cache."""
    first = tl.program_id(0).to(tl.int64) * tiles * ROWS
    for tile in range(tiles):
        row = first + tile * ROWS + tl.arange(0, ROWS)
        average = tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
        inverse = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
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
            own = tl.program_id(0).to(tl.int64) * width + column
            later = (column < width) & (tile > 0)
            weight_total = tl.load(dweight + own, mask=later, other=0.0) + tl.sum(grad * normed, 0)
            bias_total = tl.load(dbias + own, mask=later, other=0.0) + tl.sum(grad, 0)
            tl.store(dweight + own, weight_total, mask=column < width)
            tl.store(dbias + own, bias_total, mask=column < width)


def _launch_forward(
    rows: Tensor, weight: Tensor, bias: Tensor, y: Tensor, mean: Tensor, rstd: Tensor, eps: float, zero_centered: bool
) -> None:
    height, width = rows.shape
    if width > WIDEST_FORWARD:
        _layer_norm_forward_by_columns[(height,)](
            rows, weight, bias, y, mean, rstd, width, eps, zero_centered, WIDE_BLOCK, num_warps=WIDE_WARPS
        )
        return
    tiles = RowTiles.of(rows)
    _layer_norm_forward[(tiles.count,)](
        rows, weight, bias, y, mean, rstd, height, width, eps, zero_centered, tiles.rows, tiles.block,
        num_warps=tiles.warps,
    )  # fmt: skip


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y = torch.empty_like(rows)
        mean, rstd = torch.empty(2, len(rows), dtype=torch.float32, device=x.device)
        if rows.numel():
            with on_device(rows):
                _launch_forward(rows, weight, bias, y, mean, rstd, eps, zero_centered)
        ctx.save_for_backward(rows, weight, bias, mean, rstd)
        ctx.zero_centered = zero_centered
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        rows, weight, bias, mean, rstd = ctx.saved_tensors
        is_wide = rows.shape[1] > WIDEST_BACKWARD
        tiles = RowTiles.by_columns(rows) if is_wide else RowTiles.of(rows)
        kernel = _layer_norm_backward_by_columns if is_wide else _layer_norm_backward
        dx = torch.empty_like(rows)
        parts = torch.empty(2, tiles.programs, rows.shape[1], dtype=torch.float32, device=rows.device)
        if rows.numel():
            with on_device(rows):
                kernel[(tiles.programs,)](
                    grads[0].contiguous(), rows, weight, mean, rstd, dx, parts[0], parts[1], *rows.shape,
                    tiles.per_program, ctx.zero_centered, tiles.rows, tiles.block, num_warps=tiles.warps,
                )  # fmt: skip
        dweight, dbias = parts.sum(1)
        return dx.view(grads[0].shape), dweight.to(weight.dtype), dbias.to(bias.dtype), None, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """As mt_core.nn.kernels.reference.layer_norm."""
    return _LayerNorm.apply(x, weight.contiguous(), bias.contiguous(), eps, zero_centered)
