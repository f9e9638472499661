# mypy: disable-error-code="no-untyped-def"
"""Casts to FP8 of a gated activation, and of the gradient of its input, which is never written in 16 bits.

A program computes the numbers of a tile, rounds them to the dtype of the input as the activation's own kernel does, and
casts them as the kernels of `fp8_casts` do. Of a gradient it has a tile of the gate half and that of the other half.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.kernels.reference.fp8_casts import (
    ALIGNMENT,
    BLOCK,
    Activated,
    Along,
    Granularity,
    Matrix,
    Scaled,
    WholeCast,
)
from mt_core.nn.kernels.triton_kernels.activation import gate_slope, gate_value, through_factor, up_factor
from mt_core.nn.kernels.triton_kernels.fp8_casts import (
    AMAX_PROGRAMS,
    AMAX_WARPS,
    TILE_WARPS,
    TritonCasts,
    WholeTarget,
    is_interpreted,
    limits,
    magnitude_bits,
    note,
    rounded,
    rounded_up,
    scale_of,
    scale_of_whole,
    store_cast,
    store_largest,
    tile_grid,
)
from mt_core.nn.kernels.triton_kernels.launch import multiprocessors, on_device

_AMAX_BLOCK = 4096
_TILE = (128, 64)
"""Rows and columns of a tile; half of what a cast alone has, as up to three tiles are loaded."""
_BLOCK_TILES = {False: (64, BLOCK), True: (BLOCK, 64)}
"""Rows and columns, where blocks of rows (True: of columns) have a scale."""
_ROW_TILES = {False: (4, 2048), True: (64, 128)}
"""Lines and numbers of each at a time, of rows and of columns."""


@triton.jit
def _halves(x, grad, row, column, width, inside, NAME: tl.constexpr, GRADIENT: tl.constexpr):
    """In fp32, rounded to the dtype of x [rows, 2 width]: the gradients of the gate and of the other half by grad
    [rows, width]; without GRADIENT the activation, twice."""
    # Of the halves' own matrix [rows, width]; a row of x is twice as long: row * 2 width + column.
    place = row * width + column
    gate = tl.load(x + row * width + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * width + place + width, mask=inside, other=0.0).to(tl.float32)
    if GRADIENT:
        after = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        # As _activation_backward computes them, so that the bytes are those of separate kernels.
        other = through_factor(after * gate_value(gate, NAME), up, NAME)
        first = after * up_factor(up, NAME) * gate_slope(gate, NAME)
    else:
        first = gate_value(gate, NAME) * up_factor(up, NAME)
        other = first
    # The rounding to 16 bits that writing them between two kernels would do.
    return first.to(x.dtype.element_ty).to(tl.float32), other.to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _fp8_amax_of_activation(
    x, grad, parts, rows, width, NAME: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """parts [programs]: bits of the largest magnitude of this program's rows."""
    largest = tl.zeros([BLOCK], tl.int32)
    first, programs = tl.program_id(0), tl.num_programs(0)
    # Rows first, first + programs, ...: neighbouring programs read neighbouring rows.
    for step in range(tl.cdiv(rows - first, programs)):
        row = (first + step * programs).to(tl.int64)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            gate_half, other = _halves(x, grad, row, column, width, column < width, NAME, GRADIENT)
            largest = tl.maximum(largest, tl.maximum(magnitude_bits(gate_half), magnitude_bits(other)))
    tl.store(parts + first, tl.max(largest, 0))


@triton.jit
def _fp8_cast_of_activation(
    x, grad, amaxes, count, limit, scale, data, transposed, parts, rows, width, padded,
    COUNT: tl.constexpr, LARGEST: tl.constexpr, STRAIGHT: tl.constexpr, TRANSPOSED: tl.constexpr,
    MEASURED: tl.constexpr, EMULATED: tl.constexpr, NAME: tl.constexpr, GRADIENT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Same as _fp8_cast, of [rows, width] or [rows, 2 width]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    first, other = _halves(x, grad, row[:, None], column[None, :], width, inside, NAME, GRADIENT)
    divisor = scale_of_whole(amaxes, count, limit, scale, COUNT)
    if MEASURED:
        store_largest(parts, tl.maximum(magnitude_bits(first), magnitude_bits(other)))
    # data [rows, columns]: gradients of the gate half end at `width`, those of the other half at `columns`.
    columns = width * (2 if GRADIENT else 1)
    store_cast(
        first, divisor, data, transposed, row, column, rows, width, columns, padded,
        LARGEST, STRAIGHT, TRANSPOSED, EMULATED,
    )  # fmt: skip
    if GRADIENT:
        store_cast(
            other, divisor, data, transposed, row, column + width, rows, columns, columns, padded,
            LARGEST, STRAIGHT, TRANSPOSED, EMULATED,
        )  # fmt: skip


@triton.jit
def _store_blocks(
    value, data, scale, row, column, first_block, rows, columns, length, limit,
    LARGEST: tl.constexpr, TURNED: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """A tile with a scale for each row; TURNED: its transpose with one for each column."""
    bits = magnitude_bits(value)
    if TURNED:
        divisor = scale_of(tl.max(bits, 0), limit)
        across = divisor[None, :]
    else:
        divisor = scale_of(tl.max(bits, 1), limit)
        across = divisor[:, None]
    value = tl.clamp(tl.div_rn(value, across), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    cast = rounded(value, data.dtype.element_ty, EMULATED)
    # 128 is BLOCK of casts.py, which a kernel could read as a constexpr only.
    blocks = length // 128
    if TURNED:
        tl.store(scale + column * blocks + first_block, divisor, mask=column < columns)
        within = (column < columns)[:, None] & (row < length)[None, :]
        tl.store(data + column[:, None] * length + row[None, :], tl.trans(cast), mask=within)
    else:
        tl.store(scale + row * blocks + first_block, divisor, mask=row < rows)
        within = (row < rows)[:, None] & (column < length)[None, :]
        tl.store(data + row[:, None] * length + column[None, :], cast, mask=within)


@triton.jit
def _fp8_cast_blocks_of_activation(
    x, grad, data, scale, rows, width, length, limit,
    LARGEST: tl.constexpr, TURNED: tl.constexpr, EMULATED: tl.constexpr, NAME: tl.constexpr, GRADIENT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Same as _fp8_cast_blocks, of [rows, width] or [rows, 2 width], whose halves are multiples of blocks."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    first, other = _halves(x, grad, row[:, None], column[None, :], width, inside, NAME, GRADIENT)
    block = tl.program_id(0) if TURNED else tl.program_id(1)
    _store_blocks(first, data, scale, row, column, block, rows, width, length, limit, LARGEST, TURNED, EMULATED)
    if GRADIENT:
        # The other half begins width / 128 blocks further along a row. Of the transpose its lines are further down, in
        # the same blocks of rows.
        if not TURNED:
            block += width // 128
        end = column + width
        _store_blocks(other, data, scale, row, end, block, rows, 2 * width, length, limit, LARGEST, TURNED, EMULATED)


@triton.jit
def _fp8_cast_rows_of_activation(
    x, grad, data, scale, rows, width, length, limit,
    LARGEST: tl.constexpr, TURNED: tl.constexpr, EMULATED: tl.constexpr, NAME: tl.constexpr, GRADIENT: tl.constexpr,
    LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Same as _fp8_cast_rows, of [rows, width] or [rows, 2 width]. Two halves of a row have one scale, of a column two
    (TURNED)."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)[:, None]
    lines, extent = (width, rows) if TURNED else (rows, width)
    largest, second = tl.zeros([LINES, BLOCK], tl.int32), tl.zeros([LINES, BLOCK], tl.int32)
    for first in range(0, extent, BLOCK):
        place = first + tl.arange(0, BLOCK)[None, :].to(tl.int64)
        row, column = (place, line) if TURNED else (line, place)
        gate_half, other = _halves(x, grad, row, column, width, (line < lines) & (place < extent), NAME, GRADIENT)
        largest = tl.maximum(largest, magnitude_bits(gate_half))
        second = tl.maximum(second, magnitude_bits(other))
    # A row [gate | up] has one scale for both halves.
    if not TURNED:
        largest = tl.maximum(largest, second)
        second = largest
    divisor = scale_of(tl.max(largest, 1)[:, None], limit)
    divisor_of_other = scale_of(tl.max(second, 1)[:, None], limit)
    tl.store(scale + line, divisor, mask=line < lines)
    if TURNED and GRADIENT:
        tl.store(scale + width + line, divisor_of_other, mask=line < lines)
    # The sizes of a matrix in FP8 are multiples of ALIGNMENT (Fp8Options.objection), so a gradient's row has no
    # padding; the halves are written one behind the other.
    end = width if GRADIENT and not TURNED else length
    behind = width.to(tl.int64) * length if TURNED else width  # from a number of the gate half to that of the other
    # Second pass: the same numbers are computed again from x, which the cache may still hold.
    for first in range(0, end, BLOCK):
        place = first + tl.arange(0, BLOCK)[None, :].to(tl.int64)
        row, column = (place, line) if TURNED else (line, place)
        gate_half, other = _halves(x, grad, row, column, width, (line < lines) & (place < extent), NAME, GRADIENT)
        target, within = data + line * length + place, (line < lines) & (place < end)
        gate_half = tl.clamp(tl.div_rn(gate_half, divisor), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        tl.store(target, rounded(gate_half, data.dtype.element_ty, EMULATED), mask=within)
        if GRADIENT:
            other = tl.clamp(tl.div_rn(other, divisor_of_other), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
            tl.store(target + behind, rounded(other, data.dtype.element_ty, EMULATED), mask=within)


class TritonActivationCasts(TritonCasts):
    """TritonCasts that take an Activated too."""

    def amaxes(self, x: Matrix) -> Tensor:
        if isinstance(x, Tensor):
            return super().amaxes(x)
        rows = len(x.x)
        # At least one, which writes the magnitude 0 of a matrix without rows.
        programs = max(min(rows, multiprocessors(x.x) * AMAX_PROGRAMS), 1)
        parts = torch.empty(programs, dtype=torch.int32, device=x.x.device)
        with on_device(x.x):
            _fp8_amax_of_activation[(programs,)](
                *_operands(x), parts, rows, x.width, *_kind(x), _AMAX_BLOCK, num_warps=AMAX_WARPS
            )
        return parts.view(torch.float32)

    def by_amaxes(self, x: Matrix, amaxes: Tensor, dtype: torch.dtype, margin: int, along: Along) -> WholeCast:
        if isinstance(x, Tensor):
            return super().by_amaxes(x, amaxes, dtype, margin, along)
        scale = torch.empty((), dtype=torch.float32, device=x.x.device)
        return _cast(x, scale, amaxes, dtype, margin, along)[0]

    def by_scale(self, x: Matrix, scale: Tensor, dtype: torch.dtype, along: Along) -> WholeCast:
        if isinstance(x, Tensor):
            return super().by_scale(x, scale, dtype, along)
        return _cast(x, scale, None, dtype, 0, along)[0]

    def by_past(
        self, x: Matrix, past: Tensor, noted: Tensor | None, dtype: torch.dtype, margin: int, along: Along
    ) -> WholeCast:
        if isinstance(x, Tensor):
            return super().by_past(x, past, noted, dtype, margin, along)
        scale = torch.empty((), dtype=torch.float32, device=x.x.device)
        cast, parts = _cast(x, scale, past.reshape(1), dtype, margin, along, measured=True)
        note(parts, noted, scale)
        return cast

    def rows(self, x: Matrix, dtype: torch.dtype, margin: int) -> Scaled:
        if isinstance(x, Tensor):
            return super().rows(x, dtype, margin)
        lines, columns = x.shape
        data = torch.empty(lines, rounded_up(columns, ALIGNMENT), dtype=dtype, device=x.x.device)  # [lines, length]
        scale = torch.empty(lines, 1, dtype=torch.float32, device=x.x.device)
        tile = _ROW_TILES[x.turned]
        grid = (triton.cdiv(x.width if x.turned else len(x.x), tile[0]),)
        _launch_by_lines(_fp8_cast_rows_of_activation, grid, x, data, scale, margin, tile)
        return Scaled(data, scale, Granularity.ROW)

    def row_blocks(self, x: Matrix, dtype: torch.dtype, margin: int) -> Scaled:
        if isinstance(x, Tensor):
            return super().row_blocks(x, dtype, margin)
        lines, columns = x.shape
        data = torch.empty(lines, rounded_up(columns, BLOCK), dtype=dtype, device=x.x.device)
        scale = torch.empty(lines, data.shape[1] // BLOCK, dtype=torch.float32, device=x.x.device)
        tile = _BLOCK_TILES[x.turned]
        grid = (triton.cdiv(len(x.x), tile[0]), triton.cdiv(x.width, tile[1]))
        _launch_by_lines(_fp8_cast_blocks_of_activation, grid, x, data, scale, margin, tile)
        return Scaled(data, scale, Granularity.ROW_BLOCK)


def _operands(x: Activated) -> tuple[Tensor, Tensor]:
    return x.x, x.x if x.grad is None else x.grad


def _kind(x: Activated) -> tuple[str, bool]:
    return x.name, x.grad is not None  # NAME, GRADIENT


def _launch_by_lines(
    kernel: Any, grid: tuple[int, ...], x: Activated, data: Tensor, scale: Tensor, margin: int, tile: tuple[int, int]
) -> None:
    if all(grid):
        with on_device(x.x):
            kernel[grid](
                *_operands(x), data, scale, len(x.x), x.width, data.shape[1], *limits(data.dtype, margin), x.turned,
                is_interpreted(), *_kind(x), *tile, num_warps=TILE_WARPS,
            )  # fmt: skip


def _cast(
    x: Activated,
    scale: Tensor,
    amaxes: Tensor | None,
    dtype: torch.dtype,
    margin: int,
    along: Along,
    measured: bool = False,
) -> tuple[WholeCast, Tensor]:
    """The cast, and with `measured` the largest magnitudes of tiles."""
    rows, columns = x.shape
    grid = tile_grid(rows, x.width, *_TILE)
    target = WholeTarget.empty(rows, columns, dtype, along, grid, measured, x.x.device)
    limit, largest = limits(dtype, margin)
    bits = target.parts if amaxes is None else amaxes.view(torch.int32)
    with on_device(x.x):
        _fp8_cast_of_activation[grid](
            *_operands(x), bits, len(bits), limit, scale, *target.written, target.parts, rows, x.width, target.padded,
            0 if amaxes is None else triton.next_power_of_2(len(bits)), largest,
            *target.flags, measured, is_interpreted(), *_kind(x), *_TILE, num_warps=TILE_WARPS,
        )  # fmt: skip
    return target.cast(scale), target.parts
