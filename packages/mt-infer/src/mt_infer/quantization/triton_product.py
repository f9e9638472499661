# mypy: disable-error-code="no-untyped-def"
"""Weight-only products in Triton: y = x W^T, with W as it is stored (mt_infer.quantization.groups).

Stored numbers are exact in 16 bits, so that tensor cores multiply them as they are. A group's scale multiplies the
group's part of a product, in fp32; a low adds the sum of the group's inputs. Nothing of the size of W is written.

Programs share the input features too, where there are few others (split-K). Their number follows from shapes alone, so
that launches can be captured, and sums are in one order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.kernels.triton_kernels.launch import multiprocessors, on_device
from mt_infer.quantization.groups import Stored

COLUMNS = 64
"""Of the output, of a program: rows of the left operand of an instruction of the tensor cores (wgmma)."""
DEPTH = 128
"""Input features of a step, with inputs of 16 bits."""
PROGRAMS_PER_PROCESSOR = 4
"""So many have registers on Hopper, with 16 rows: 128 a thread."""
STAGES = 4
"""Of the pipeline of loads. A program has three tiles of W on the way, 12 KiB of int4 or 24 KiB of 8 bits: four on each
of 132 processors have 6 MiB or more. An H200 transfers 4.8 MB in a latency of 1 us."""
LEAST_STEPS = 2
"""Of a program: below, the launch and the sum of the parts cost more than they save."""
SUM_BLOCK = 1024
LINES, LINE_BYTES = 8, 256
"""Of a program that dequantizes."""


@triton.jit
def _multiply_rows(
    x, stored, scales, lows, bias, out, start, end, split, line, column, rows, width, depth, groups, x_row,
    GROUP: tl.constexpr, PER_BYTE: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Rows [start, start + ROWS) before `end`, by the lines of W that are for the columns `column`."""
    # Of a group, bytes: all, or of int4 half as many. The upper bits of a byte are SPAN features behind the lower.
    SPAN: tl.constexpr = GROUP // PER_BYTE
    BYTES: tl.constexpr = DEPTH // PER_BYTE
    STEPS: tl.constexpr = (SPAN + BYTES - 1) // BYTES
    steps = groups * STEPS
    share = tl.cdiv(steps, SPLITS)
    there = column < width
    row = start + tl.arange(0, ROWS)
    known = row < end
    line_bytes = stored + (line * (groups * SPAN))[:, None]
    line_inputs = x + (row.to(tl.int64) * x_row)[:, None]
    total = tl.zeros([column.shape[0], ROWS], tl.float32)
    for step in range(split * share, tl.minimum(split * share + share, steps)):
        group = step // STEPS
        in_group = (step % STEPS) * BYTES + tl.arange(0, BYTES)
        feature = group * GROUP + in_group
        read, counted = there[:, None], known[:, None] & (feature < depth)[None, :]
        if SPAN % BYTES != 0:
            inside = (in_group < SPAN)[None, :]
            read, counted = read & inside, counted & inside
        weights = tl.load(line_bytes + (group * SPAN + in_group)[None, :], mask=read, other=0.0)
        inputs = tl.load(line_inputs + feature[None, :], mask=counted, other=0.0)
        scale = tl.load(scales + line * groups + group, mask=there, other=0.0)
        if PER_BYTE == 2:
            counted = counted & (feature + SPAN < depth)[None, :]
            upper_inputs = tl.load(line_inputs + (feature + SPAN)[None, :], mask=counted, other=0.0)
            low = tl.load(lows + line * groups + group, mask=there, other=0.0)
            # As signed bytes, which become 16-bit numbers in fewer instructions.
            lower = (weights & 15).to(tl.int8, bitcast=True).to(x.dtype.element_ty)
            upper = (weights >> 4).to(tl.int8, bitcast=True).to(x.dtype.element_ty)
            product = tl.dot(lower, tl.trans(inputs), input_precision="ieee")
            product = tl.dot(upper, tl.trans(upper_inputs), product, input_precision="ieee")
            total += low[:, None] * tl.sum(inputs.to(tl.float32) + upper_inputs.to(tl.float32), 1)[None, :]
        else:
            product = tl.dot(weights.to(x.dtype.element_ty), tl.trans(inputs), input_precision="ieee")
        total += product * scale[:, None]
    if BIAS:
        total += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[:, None]
    place = (split.to(tl.int64) * rows + row)[:, None] * width + column[None, :]
    tl.store(out + place, tl.trans(total).to(out.dtype.element_ty), mask=known[:, None] & there[None, :])


@triton.jit
def _weight_only_product(
    x, stored, scales, lows, bias, ends, out, rows, width, depth, groups, x_row,
    GROUP: tl.constexpr, PER_BYTE: tl.constexpr, BIAS: tl.constexpr, EXPERTS: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """x [R, depth]; stored [E, width, bytes], scales and lows [E, width, groups]; out [SPLITS, R, width].

    EXPERTS: the rows of x are in the order of experts, and end at `ends` [E]. The tile of W is the left operand, whose
    64 rows a tensor core's instruction takes; there may be few rows of x.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2) % SPLITS
    expert = (tl.program_id(2) // SPLITS).to(tl.int64)
    line = expert * width + column
    first = tl.program_id(1) * ROWS
    if EXPERTS:
        before = tl.load(ends + tl.maximum(expert - 1, 0))
        first += tl.where(expert > 0, before, 0)
        end = tl.load(ends + expert)
        for start in range(first, end, tl.num_programs(1) * ROWS):
            _multiply_rows(
                x, stored, scales, lows, bias, out, start, end, split, line, column, rows, width, depth, groups, x_row,
                GROUP, PER_BYTE, BIAS, SPLITS, ROWS, DEPTH,
            )  # fmt: skip
    else:  # without the loop, which takes registers
        _multiply_rows(
            x, stored, scales, lows, bias, out, first, rows, split, line, column, rows, width, depth, groups, x_row,
            GROUP, PER_BYTE, BIAS, SPLITS, ROWS, DEPTH,
        )  # fmt: skip


@triton.jit
def _sum_of_splits(parts, bias, out, numbers, width, BIAS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """parts [SPLITS, numbers] in fp32 -> out [numbers], rows of `width`."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < numbers
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(SPLITS):
        total += tl.load(parts + split * numbers + place, mask=there, other=0.0)
    if BIAS:
        total += tl.load(bias + place % width, mask=there, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _dequantize(
    stored, scales, lows, out, lines, depth, groups,
    GROUP: tl.constexpr, PER_BYTE: tl.constexpr, LINES: tl.constexpr, LINE_BYTES: tl.constexpr,
):  # fmt: skip
    """stored [lines, bytes] -> out [lines, depth]"""
    SPAN: tl.constexpr = GROUP // PER_BYTE
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)[:, None]
    byte = tl.program_id(1) * LINE_BYTES + tl.arange(0, LINE_BYTES)[None, :]
    group = byte // SPAN
    feature = group * GROUP + byte % SPAN
    there = (line < lines) & (feature < depth)
    weights = tl.load(stored + line * (groups * SPAN) + byte, mask=there, other=0.0)
    scale = tl.load(scales + line * groups + group, mask=there, other=0.0)
    place = out + line * depth + feature
    if PER_BYTE == 2:
        low = tl.load(lows + line * groups + group, mask=there, other=0.0)
        tl.store(place, ((weights & 15).to(tl.float32) * scale + low).to(out.dtype.element_ty), mask=there)
        upper = (weights >> 4).to(tl.float32) * scale + low
        tl.store(place + SPAN, upper.to(out.dtype.element_ty), mask=there & (feature + SPAN < depth))
    else:
        tl.store(place, (weights.to(tl.float32) * scale).to(out.dtype.element_ty), mask=there)


@dataclass(frozen=True)
class Tiling:
    """rows, depth: of a step of a program. row_tiles: programs for the rows of an expert. splits: of all depth."""

    rows: int
    depth: int
    row_tiles: int
    splits: int


@dataclass(frozen=True)
class Sizes:
    """Of a product. rows: of all experts. itemsize: bytes of an input. bits: of a stored number."""

    rows: int
    width: int
    groups: int
    group: int
    experts: int
    itemsize: int
    bits: int


def tiling(sizes: Sizes, processors: int) -> Tiling:
    rows_of_expert = triton.cdiv(sizes.rows, sizes.experts)
    depth = min(DEPTH * 2 // sizes.itemsize, max(triton.next_power_of_2(sizes.group), 128 // sizes.bits))
    rows = min(max(triton.next_power_of_2(rows_of_expert), 16), 128 // sizes.itemsize)
    row_tiles = triton.cdiv(rows_of_expert, rows)
    programs = triton.cdiv(sizes.width, COLUMNS) * row_tiles * sizes.experts
    steps = sizes.groups * triton.cdiv(sizes.group, depth)
    # Parts of sums are written and read, 8 bytes each: at most a quarter of the bytes of the weights.
    few_bytes = sizes.groups * sizes.group * sizes.bits // (256 * sizes.rows)
    wanted = min(PROGRAMS_PER_PROCESSOR * processors // programs, steps // LEAST_STEPS, few_bytes)
    splits = 1 if sizes.experts > 1 else 1 << max(wanted.bit_length() - 1, 0)
    return Tiling(rows, depth, row_tiles, splits)


def triton_product(
    x: Tensor, stored: Stored, group: int, bias: Tensor | None = None, ends: Tensor | None = None
) -> Tensor:
    """x [R, in], stored [out, ...] -> x W^T + bias [R, out], in the dtype of x, accumulated in fp32.

    ends: [E] int32, where the rows of each expert end; stored [E, out, ...] then, without a bias.
    """
    values, scales, lows = _operands(stored)
    x = x if x.stride(-1) == 1 else x.contiguous()
    (rows, depth), (width, groups), bits = x.shape, scales.shape[-2:], 8 if lows is None else 4
    out = x.new_empty(rows, width)
    if not out.numel():
        return out
    experts = 1 if ends is None else len(ends)
    tile = tiling(Sizes(rows, width, groups, group, experts, x.element_size(), bits), multiprocessors(x))
    is_split = tile.splits > 1
    parts = x.new_empty(tile.splits, rows, width, dtype=torch.float32) if is_split else out
    with on_device(x):
        _weight_only_product[(triton.cdiv(width, COLUMNS), tile.row_tiles, experts * tile.splits)](
            x, values, scales, lows, bias, ends, parts, rows, width, depth, groups, x.stride(0),
            group, 8 // bits, bias is not None and not is_split, ends is not None, tile.splits,
            tile.rows, COLUMNS, tile.depth, num_warps=4, num_stages=STAGES,
        )  # fmt: skip
        if is_split:
            _sum_of_splits[(triton.cdiv(out.numel(), SUM_BLOCK),)](
                parts, bias, out, out.numel(), width, bias is not None, tile.splits, SUM_BLOCK, num_warps=4
            )
    return out


def triton_dequantize(stored: Stored, group: int, columns: int, dtype: torch.dtype) -> Tensor:
    """As mt_infer.quantization.groups.dequantize, in one pass over memory: [..., columns] in dtype."""
    values, scales, lows = _operands(stored)
    out = scales.new_empty(*scales.shape[:-1], columns, dtype=dtype)
    lines, per_byte = out.numel() // columns, 1 if lows is None else 2
    with on_device(out):
        _dequantize[(triton.cdiv(lines, LINES), triton.cdiv(values.shape[-1], LINE_BYTES))](
            values, scales, lows, out, lines, columns, scales.shape[-1], group, per_byte, LINES, LINE_BYTES, num_warps=4
        )
    return out


def _operands(stored: Stored) -> tuple[Tensor, Tensor, Tensor | None]:
    """Bytes of FP8 as numbers of FP8; lows for int4."""
    values, scales, *lows = (part.contiguous() for part in stored)
    if values.dtype == torch.uint8 and not lows:
        values = values.view(torch.float8_e4m3fn)
    return values, scales, lows[0] if lows else None
