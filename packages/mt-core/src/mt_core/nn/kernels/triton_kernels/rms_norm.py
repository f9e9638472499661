# mypy: disable-error-code="no-untyped-def"
"""RMSNorm. Forward reads x and writes y once; backward reads dy and x and writes dx once."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.kernels.triton_kernels.launch import on_device
from mt_core.nn.kernels.triton_kernels.row_tiles import RowTiles

WIDEST_BACKWARD = 8192
"""Columns that a program of the backward pass holds in registers; from the next power of two on they spill."""


@triton.jit
def _rms_norm_forward(
    x, weight, y, rstd, rows, width, eps, ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    offsets = row[:, None] * width + column[None, :]
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        scale += 1.0
    value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 1) / width + eps)
    tl.store(y + offsets, value * inverse[:, None] * scale[None, :], mask=inside)
    tl.store(rstd + row, inverse, mask=row < rows)


@triton.jit
def _rms_norm_backward(
    dy, x, weight, rstd, dx, dweight, rows, width, tiles,
    ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dweight: [programs, width], what this program's rows add."""
    column = tl.arange(0, BLOCK)
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        scale += 1.0
    total = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64) * tiles * ROWS
    for tile in range(tiles):
        row = first + tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        offsets = row[:, None] * width + column[None, :]
        inverse = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) * inverse
        grad = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(grad * normed, 0)
        grad *= scale[None, :]
        mean = tl.sum(grad * normed, 1) / width
        tl.store(dx + offsets, inverse * (grad - normed * mean[:, None]), mask=inside)
    tl.store(dweight + tl.program_id(0).to(tl.int64) * width + column, total, mask=column < width)


@triton.jit
def _rms_norm_backward_by_columns(
    dy, x, weight, rstd, dx, dweight, rows, width, tiles,
    ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As _rms_norm_backward, for rows wider than the registers: each is read again from the cache."""
    first = tl.program_id(0).to(tl.int64) * tiles * ROWS
    for tile in range(tiles):
        row = first + tile * ROWS + tl.arange(0, ROWS)
        inverse = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
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
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = (row < rows)[:, None] & (column < width)[None, :]
            offsets = row[:, None] * width + column[None, :]
            scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
            if ZERO_CENTERED:
                scale += 1.0
            normed = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) * inverse
            grad = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx + offsets, inverse * (grad * scale[None, :] - normed * mean), mask=inside)
            own = dweight + tl.program_id(0).to(tl.int64) * width + column
            before = tl.load(own, mask=(column < width) & (tile > 0), other=0.0)
            tl.store(own, before + tl.sum(grad * normed, 0), mask=column < width)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        tiles = RowTiles.of(rows)
        y = torch.empty_like(rows)
        rstd = torch.empty(len(rows), dtype=torch.float32, device=x.device)
        if rows.numel():
            with on_device(rows):
                _rms_norm_forward[(tiles.count,)](
                    rows, weight, y, rstd, *rows.shape, eps, zero_centered, tiles.rows, tiles.block,
                    num_warps=tiles.warps,
                )  # fmt: skip
        ctx.save_for_backward(rows, weight, rstd)
        ctx.zero_centered = zero_centered
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weight, rstd = ctx.saved_tensors
        is_wide = rows.shape[1] > WIDEST_BACKWARD
        tiles = RowTiles.by_columns(rows) if is_wide else RowTiles.of(rows)
        kernel = _rms_norm_backward_by_columns if is_wide else _rms_norm_backward
        dx = torch.empty_like(rows)
        parts = torch.empty(tiles.programs, rows.shape[1], dtype=torch.float32, device=rows.device)
        if rows.numel():
            with on_device(rows):
                kernel[(tiles.programs,)](
                    grads[0].contiguous(), rows, weight, rstd, dx, parts, *rows.shape, tiles.per_program,
                    ctx.zero_centered, tiles.rows, tiles.block, num_warps=tiles.warps,
                )  # fmt: skip
        return dx.view(grads[0].shape), parts.sum(0).to(weight.dtype), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """As mt_core.nn.kernels.reference.rms_norm."""
    return _RMSNorm.apply(x, weight.contiguous(), eps, zero_centered)
