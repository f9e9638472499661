# mypy: disable-error-code="no-untyped-def"
"""Casts to FP8. By one scale, a pass over memory writes the matrix, its transpose and its largest magnitude; by a scale
for each row or block, the matrix or its transpose.

A product contracts neighbours in memory, so a matrix that takes part in two products is needed in both orders. Largest
magnitudes are compared as integers: the bits of numbers that are not negative have their order, and NaN is the largest.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.kernels.reference.fp8_casts import ALIGNMENT, BLOCK, Along, Granularity, Scaled, WholeCast
from mt_core.nn.kernels.triton_kernels.launch import multiprocessors, on_device

_AMAX_BLOCK, AMAX_WARPS = 8192, 16
AMAX_PROGRAMS = 2
"""Programs of a multiprocessor. Few, as each tile of a cast reads what every program found."""
TILE_SIZE, TILE_WARPS = 128, 8
"""Rows and columns of a tile: 128 bytes next to one another in either order."""
# Of columns, the 64 lines of a tile are the neighbours in memory: 128 bytes of bf16 at once.
_ROW_TILES = {False: (4, 2048), True: (64, 128)}
"""Lines and numbers of each that a program has at a time, of rows and of columns."""
_SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def magnitude_bits(x):
    return x.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def _fp8_amax(x, parts, size, blocks, BLOCK: tl.constexpr):
    """parts [programs]: bits of the largest magnitude of this program's blocks."""
    # Integers: a maximum of floats would drop a NaN.
    largest = tl.zeros([BLOCK], tl.int32)
    # Neighbouring blocks to one program; int64, as an index passes 2^31 for large matrices.
    first = tl.program_id(0).to(tl.int64) * blocks * BLOCK
    for block in range(blocks):
        index = first + block * BLOCK + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, magnitude_bits(tl.load(x + index, mask=index < size, other=0.0).to(tl.float32)))
    tl.store(parts + tl.program_id(0), tl.max(largest, 0))


@triton.jit
def scale_of(bits, limit):
    """Same as the reference's scale_of, of the bits of magnitudes."""
    # div_rn: Triton's / is an approximate division in fp32, and the bytes have to be those of torch's casts.
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), limit)
    scale = tl.where(scale < _SMALLEST, _SMALLEST, scale)  # which leaves NaN
    return tl.where(bits == 0, 1.0, scale)


@triton.jit
def rounded(value, TYPE: tl.constexpr, EMULATED: tl.constexpr):
    """fp32 within the range of the format -> the format, to nearest, ties to even. EMULATED: by integers, as torch's
    CPU does, for the interpreter, whose conversion is not exact."""
    if not EMULATED:
        result = value.to(TYPE)
    else:
        DIGITS: tl.constexpr = 3 if tl.float8e4nv == TYPE else 2
        BIAS: tl.constexpr = 7 if tl.float8e4nv == TYPE else 15
        bits = magnitude_bits(value)
        sign = (value.to(tl.int32, bitcast=True) >> 31) & 1
        # Below the smallest normal number: added to one whose last place is the format's smallest number.
        ones = tl.full(bits.shape, (127 - BIAS + 24 - DIGITS) << 23, tl.int32)
        # The sum's last place is the format's smallest number, so the addition itself rounds to nearest even, and the
        # difference of bits counts multiples of that number: the code of a subnormal.
        small = bits.to(tl.float32, bitcast=True) + ones.to(tl.float32, bitcast=True)
        small_bits = small.to(tl.int32, bitcast=True) - ones
        odd = (bits >> (23 - DIGITS)) & 1
        # Exponent bias 127 -> BIAS, then half of the last place kept, less 1 for even numbers: ties to even.
        normal_bits = (bits - ((127 - BIAS) << 23) + (1 << (22 - DIGITS)) - 1 + odd) >> (23 - DIGITS)
        code = tl.where(bits < ((128 - BIAS) << 23), small_bits, normal_bits)
        # 0x7F is a NaN of both formats.
        code = tl.where(bits > _INFINITY, 0x7F, code) | (sign << 7)
        result = code.to(tl.uint8).to(TYPE, bitcast=True)
    return result


@triton.jit
def scale_of_whole(amaxes, count, limit, scale, COUNT: tl.constexpr):
    """COUNT 0: `scale`, which is read; else that of amaxes, and `scale` is written."""
    if COUNT == 0:
        divisor = tl.load(scale)
    else:
        which = tl.arange(0, COUNT)
        # Each program takes the maximum again: a few hundred numbers from the cache instead of a launch between.
        divisor = scale_of(tl.max(tl.load(amaxes + which, mask=which < count, other=0), 0), limit)
        # One writer. No program of this launch reads it.
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale, divisor)
    return divisor


@triton.jit
def store_largest(parts, bits):
    """bits [rows, columns] of this program's tile."""
    tl.store(parts + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.max(tl.max(bits, 1), 0))


@triton.jit
def store_cast(
    value, divisor, data, transposed, row, column, rows, end, columns, padded,
    LARGEST: tl.constexpr, STRAIGHT: tl.constexpr, TRANSPOSED: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """A tile of data [rows, columns], up to the column `end`, and of transposed [columns, padded]."""
    # NaN has to pass: without propagate_nan it becomes -LARGEST, a number that hides it.
    value = tl.clamp(tl.div_rn(value, divisor), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    cast = rounded(value, data.dtype.element_ty, EMULATED)
    if STRAIGHT:
        inside = (row < rows)[:, None] & (column < end)[None, :]
        tl.store(data + row[:, None] * columns + column[None, :], cast, mask=inside)
    if TRANSPOSED:
        within = (column < end)[:, None] & (row < padded)[None, :]
        # The tile is transposed on the chip: both stores write neighbours. Rows behind the last one were
        # loaded as 0, and fill up the padding.
        tl.store(transposed + column[:, None] * padded + row[None, :], tl.trans(cast), mask=within)


@triton.jit
def _fp8_cast(
    x, amaxes, count, limit, scale, data, transposed, parts, rows, columns, padded,
    COUNT: tl.constexpr, LARGEST: tl.constexpr, STRAIGHT: tl.constexpr, TRANSPOSED: tl.constexpr,
    MEASURED: tl.constexpr, EMULATED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """x [rows, columns] -> data [rows, columns] and transposed [columns, padded], with zeros behind rows.

    COUNT 0: by `scale`, which is read; else by amaxes, and `scale` is written. MEASURED: parts [programs] gets the
    bits of the largest magnitude of each tile.
    """
    # int64: row * columns passes 2^31 for large matrices.
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    divisor = scale_of_whole(amaxes, count, limit, scale, COUNT)
    # Delayed scaling: the magnitude for later steps, from the numbers that are in registers already.
    if MEASURED:
        store_largest(parts, magnitude_bits(value))
    store_cast(
        value, divisor, data, transposed, row, column, rows, columns, columns, padded,
        LARGEST, STRAIGHT, TRANSPOSED, EMULATED,
    )  # fmt: skip


@triton.jit
def _fp8_note(parts, count, noted, scale, NOTED: tl.constexpr, BLOCK: tl.constexpr):
    """Ends a cast by an earlier magnitude: a matrix that is not finite gets a scale that is not a number; of another
    one the magnitude is noted (NOTED) if it is the largest of its step."""
    largest = tl.zeros([BLOCK], tl.int32)
    for first in range(0, count, BLOCK):
        index = first + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(parts + index, mask=index < count, other=0))
    bits = tl.max(largest, 0)
    # The cast itself clamped infinities, and its bytes look finite. The scale is what makes the product NaN, so that
    # the run notices it. This launch is behind the cast's, which took its
    # scale from the history.
    if bits >= _INFINITY:
        tl.store(scale, float("nan"))
    elif NOTED:
        tl.store(noted, tl.maximum(tl.load(noted), bits.to(tl.float32, bitcast=True)))


@triton.jit
def _fp8_cast_blocks(
    x, data, scale, rows, columns, length, limit,
    LARGEST: tl.constexpr, TURNED: tl.constexpr, SQUARE: tl.constexpr, EMULATED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """x [rows, columns], one program a block of TILE x TILE -> data [rows, length] with a scale for each row of a
    block; TURNED: data [columns, length] with one for each column; SQUARE: with one for a block."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)  # [TILE, TILE]
    bits = magnitude_bits(value)
    # `line` and `block` are the indices of a scale: scale [lines, blocks], blocks along the contracted dimension.
    if SQUARE:
        line = tl.program_id(1) if TURNED else tl.program_id(0)
        divisor = scale_of(tl.max(tl.max(bits, 1), 0), limit)
        across = divisor
        lines = tl.num_programs(1) if TURNED else tl.num_programs(0)
    elif TURNED:
        line = column
        divisor = scale_of(tl.max(bits, 0), limit)
        across = divisor[None, :]
        lines = columns
    else:
        line = row
        divisor = scale_of(tl.max(bits, 1), limit)
        across = divisor[:, None]
        lines = rows
    # Grid (row tiles, column tiles) of x as it is stored; of its transpose the blocks go along the rows.
    block, blocks = (tl.program_id(0), tl.num_programs(0)) if TURNED else (tl.program_id(1), tl.num_programs(1))
    tl.store(scale + line * blocks + block, divisor, mask=line < lines)
    value = tl.clamp(tl.div_rn(value, across), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    cast = rounded(value, data.dtype.element_ty, EMULATED)
    if TURNED:
        within = (column < columns)[:, None] & (row < length)[None, :]
        tl.store(data + column[:, None] * length + row[None, :], tl.trans(cast), mask=within)
    else:
        within = (row < rows)[:, None] & (column < length)[None, :]
        tl.store(data + row[:, None] * length + column[None, :], cast, mask=within)


@triton.jit
def _fp8_cast_rows(
    x, data, scale, rows, columns, length, limit,
    LARGEST: tl.constexpr, TURNED: tl.constexpr, EMULATED: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x [rows, columns], one program some rows (TURNED: columns), which it reads twice -> data [rows, length] with a
    scale for each."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)[:, None]
    lines, extent = (columns, rows) if TURNED else (rows, columns)  # scales, and numbers that share one
    largest = tl.zeros([LINES, BLOCK], tl.int32)
    for first in range(0, extent, BLOCK):
        place = first + tl.arange(0, BLOCK)[None, :]
        # place * columns passes 2^31; line is int64 already.
        offset = place.to(tl.int64) * columns + line if TURNED else line * columns + place
        value = tl.load(x + offset, mask=(line < lines) & (place < extent), other=0.0).to(tl.float32)
        largest = tl.maximum(largest, magnitude_bits(value))
    divisor = scale_of(tl.max(largest, 1)[:, None], limit)
    tl.store(scale + line, divisor, mask=line < lines)
    # Up to `length`: the padding of a row is written too, as zeros.
    for first in range(0, length, BLOCK):
        place = first + tl.arange(0, BLOCK)[None, :]
        offset = place.to(tl.int64) * columns + line if TURNED else line * columns + place
        value = tl.load(x + offset, mask=(line < lines) & (place < extent), other=0.0).to(tl.float32)
        value = tl.clamp(tl.div_rn(value, divisor), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        cast = rounded(value, data.dtype.element_ty, EMULATED)
        tl.store(data + line * length + place, cast, mask=(line < lines) & (place < length))


class TritonCasts:
    """Same as mt_core.nn.kernels.reference.fp8_casts.TorchCasts."""

    # Launches: by amaxes, _fp8_amax and _fp8_cast, which takes the maximum of its parts; by the past, _fp8_cast and
    # _fp8_note; by row or block, one for each product.

    def amaxes(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        blocks = triton.cdiv(x.numel(), _AMAX_BLOCK)
        per_program = max(triton.cdiv(blocks, multiprocessors(x) * AMAX_PROGRAMS), 1)
        parts = torch.empty(max(triton.cdiv(blocks, per_program), 1), dtype=torch.int32, device=x.device)
        with on_device(x):
            _fp8_amax[(len(parts),)](x, parts, x.numel(), per_program, _AMAX_BLOCK, num_warps=AMAX_WARPS)
        # Bits of magnitudes are the magnitudes: the caller may reduce them over ranks.
        return parts.view(torch.float32)

    def by_amaxes(self, x: Tensor, amaxes: Tensor, dtype: torch.dtype, margin: int, along: Along) -> WholeCast:
        # Written by the cast's first program.
        scale = torch.empty((), dtype=torch.float32, device=x.device)
        return _cast(x, scale, amaxes, dtype, margin, along)[0]

    def by_scale(self, x: Tensor, scale: Tensor, dtype: torch.dtype, along: Along) -> WholeCast:
        return _cast(x, scale, None, dtype, 0, along)[0]

    def by_past(
        self, x: Tensor, past: Tensor, noted: Tensor | None, dtype: torch.dtype, margin: int, along: Along
    ) -> WholeCast:
        scale = torch.empty((), dtype=torch.float32, device=x.device)
        cast, parts = _cast(x, scale, past.reshape(1), dtype, margin, along, measured=True)
        note(parts, noted, scale)
        return cast

    def rows(self, x: Tensor, dtype: torch.dtype, margin: int) -> Scaled:
        stored, turned = _stored(x)
        data = torch.empty(len(x), rounded_up(x.shape[1], ALIGNMENT), dtype=dtype, device=x.device)
        scale = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
        lines, block = _ROW_TILES[turned]
        if len(x):
            with on_device(x):
                _fp8_cast_rows[(triton.cdiv(len(x), lines),)](
                    stored, data, scale, *stored.shape, data.shape[1], *limits(dtype, margin), turned, is_interpreted(),
                    lines, block, num_warps=TILE_WARPS,
                )  # fmt: skip
        return Scaled(data, scale, Granularity.ROW)

    def row_blocks(self, x: Tensor, dtype: torch.dtype, margin: int) -> Scaled:
        data = torch.empty(len(x), rounded_up(x.shape[1], BLOCK), dtype=dtype, device=x.device)
        scale = torch.empty(len(x), data.shape[1] // BLOCK, dtype=torch.float32, device=x.device)
        return _cast_blocks(x, Scaled(data, scale, Granularity.ROW_BLOCK), margin)

    def square_blocks(self, x: Tensor, dtype: torch.dtype, margin: int) -> Scaled:
        data = torch.empty(x.shape, dtype=dtype, device=x.device)
        scale = torch.empty(len(x) // BLOCK, x.shape[1] // BLOCK, dtype=torch.float32, device=x.device)
        return _cast_blocks(x, Scaled(data, scale, Granularity.SQUARE_BLOCK), margin)


def note(parts: Tensor, noted: Tensor | None, scale: Tensor) -> None:
    """See _fp8_note."""
    with on_device(parts):
        # One program, so that the maximum needs no atomics. Without `noted` its pointer is never used.
        _fp8_note[(1,)](parts, len(parts), scale if noted is None else noted, scale, noted is not None, 1024)


def _cast_blocks(x: Tensor, result: Scaled, margin: int) -> Scaled:
    """Fills result."""
    stored, turned = _stored(x)
    grid = tuple(triton.cdiv(size, BLOCK) for size in stored.shape)
    if all(grid):
        with on_device(x):
            _fp8_cast_blocks[grid](
                stored, result.data, result.scale, *stored.shape, result.data.shape[1],
                *limits(result.data.dtype, margin), turned, result.granularity is Granularity.SQUARE_BLOCK,
                is_interpreted(), BLOCK, num_warps=TILE_WARPS,
            )  # fmt: skip
    return result


def _stored(x: Tensor) -> tuple[Tensor, bool]:
    """x as it stands in memory, contiguous, and whether that is its transpose."""
    # A transposed view is read in the order of memory, and turned by the kernel; contiguous() would be one more copy.
    if not x.is_contiguous() and x.t().is_contiguous():
        return x.t(), True
    return x.contiguous(), False


def limits(dtype: torch.dtype, margin: int) -> tuple[float, float]:
    """What magnitudes are divided by to give a scale, and the largest number."""
    largest = torch.finfo(dtype).max
    return largest / 2.0**margin, largest


def rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _cast(
    x: Tensor,
    scale: Tensor,
    amaxes: Tensor | None,
    dtype: torch.dtype,
    margin: int,
    along: Along,
    measured: bool = False,
) -> tuple[WholeCast, Tensor]:
    """The cast, and with `measured` the largest magnitudes of tiles."""
    x = x.contiguous()
    rows, columns = x.shape
    grid = tile_grid(rows, columns, TILE_SIZE, TILE_SIZE)
    target = WholeTarget.empty(rows, columns, dtype, along, grid, measured, x.device)
    limit, largest = limits(dtype, margin)
    # By a given scale no magnitudes are read: any tensor stands for the pointer.
    bits = target.parts if amaxes is None else amaxes.view(torch.int32)
    with on_device(x):
        _fp8_cast[grid](
            x, bits, len(bits), limit, scale, *target.written, target.parts, rows, columns, target.padded,
            # COUNT is a power of two for tl.arange. It changes with the matrix's size only up to the number of programs
            # of `amaxes`, so that few kernels are compiled.
            0 if amaxes is None else triton.next_power_of_2(len(bits)), largest,
            *target.flags, measured, is_interpreted(), TILE_SIZE, num_warps=TILE_WARPS,
        )  # fmt: skip
    return target.cast(scale), target.parts


@dataclass(frozen=True)
class WholeTarget:
    """What a cast by one scale writes: data [rows, columns], transposed [columns, padded], or both of them; and with
    measured magnitudes one of each program."""

    data: Tensor | None
    transposed: Tensor | None
    parts: Tensor
    padded: int

    @classmethod
    def empty(
        cls,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        along: Along,
        grid: tuple[int, int],
        measured: bool,
        device: torch.device,
    ) -> WholeTarget:
        # The transpose is contracted along rows: a length that scaled products take.
        padded = rounded_up(rows, ALIGNMENT)
        data = torch.empty(rows, columns, dtype=dtype, device=device) if along != "rows" else None
        transposed = torch.empty(columns, padded, dtype=dtype, device=device) if along != "columns" else None
        parts = torch.empty(grid[0] * grid[1] if measured else 1, dtype=torch.int32, device=device)
        return cls(data, transposed, parts, padded)

    @property
    def written(self) -> tuple[Tensor, Tensor]:
        """data and transposed; where there is one of them, it stands for the other too."""
        data = self.transposed if self.data is None else self.data
        assert data is not None
        return data, data if self.transposed is None else self.transposed

    @property
    def flags(self) -> tuple[bool, bool]:
        return self.data is not None, self.transposed is not None

    def cast(self, scale: Tensor) -> WholeCast:
        column_major = None if self.transposed is None else self.transposed.t()
        straight = column_major if self.data is None else self.data
        assert straight is not None
        return WholeCast(Scaled(straight, scale, Granularity.TENSOR), column_major)


def tile_grid(rows: int, columns: int, tile_rows: int, tile_columns: int) -> tuple[int, int]:
    return max(triton.cdiv(rows, tile_rows), 1), max(triton.cdiv(columns, tile_columns), 1)


def is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
