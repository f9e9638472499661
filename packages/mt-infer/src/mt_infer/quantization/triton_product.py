# mypy: disable-error-code="no-untyped-def"
"""Weight-only products in Triton: y = x W^T, with W as it is stored (mt_infer.quantization.groups).

Stored numbers are exact in 16 bits, so that tensor cores multiply them as they are. A group's scale multiplies the
group's part of a product, in fp32; a low multiplies the sum of the group's inputs. Nothing of the size of W is written.

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

COLUMNS = {8: 64, 4: 128}
"""Columns of the output that a program computes, by the bits of a number: a tile of W takes 8 KiB as it is stored,
and fills instructions of the tensor cores (wgmma), whose left operand has 64 rows."""
DEPTH = 128
"""Input features of a step, with inputs of 16 bits."""
PROGRAMS_PER_PROCESSOR = 4
"""So many have registers on Hopper, with 16 rows: 128 a thread."""
STAGES = 4
"""Stages of the pipeline of loads. A program has three tiles of W on the way, so that four on each of 132 processors
have 12 MiB. An H200 transfers 4.8 MB in a latency of 1 us."""
LEAST_STEPS = 2
"""Steps of a program at least: below, the launch and the sum of the parts cost more than they save."""
SUM_BLOCK = 1024
PER_WORD = {8: 1, 4: 4}
"""Numbers in a word of what is stored, by their bits."""
LINES, LINE_WORDS = 8, 256
"""Lines and words of a program that dequantizes."""


@triton.jit
def _numbers_of(words, part: tl.constexpr, PER_WORD: tl.constexpr):
    """What a word stands for; of int4 its number `part`, plus 16.

    Conversions of integers take so many instructions that they, not memory, would be the limit. Bits are put behind the
    exponent of 16 in bf16, or of 2^23 in fp32.
    """
    if PER_WORD > 1:
        # bf16 is a sign, 8 bits of exponent and 7 of mantissa. 0x4180 is 16.0, in whose mantissa one unit is 1/8: the
        # number n, placed 3 bits up (mask 0x78), makes it 16 + n. Callers take the 16 off with `low`.
        bits = words << 3 if part == 0 else words >> (4 * part - 3)
        numbers = (bits & 0x78 | 0x4180).to(tl.bfloat16, bitcast=True)
    elif words.dtype == tl.int8:
        # In fp32 above 2^23 one unit of the mantissa is 1. ^ 0x80 turns -128 ... 127 into 0 ... 255, so that the result
        # is exact.
        bits = words.to(tl.uint8, bitcast=True).to(tl.int32) ^ 0x4B000080  # 2^23 + 128 + number
        numbers = bits.to(tl.float32, bitcast=True) - 8388736.0
    else:
        # fp8: hardware converts it.
        numbers = words
    return numbers


@triton.jit
def _multiply_rows(
    x, stored, scales, lows, bias, out, start, end, split, line, column, rows, width, depth, groups, x_row,
    GROUP: tl.constexpr, PER_WORD: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Rows [start, start + ROWS) before `end`, by the lines of W that are for the columns `column`."""
    # What is stored of a group, and read in a step. The numbers of a word of int4 are SPAN features apart.
    SPAN: tl.constexpr = GROUP // PER_WORD
    WORDS: tl.constexpr = DEPTH // PER_WORD
    STEPS: tl.constexpr = (SPAN + WORDS - 1) // WORDS
    steps = groups * STEPS
    share = tl.cdiv(steps, SPLITS)
    # Masks: `there` of output features, `known` of rows, `inside` of a group that is no multiple of a step.
    there = column < width
    row = start + tl.arange(0, ROWS)
    known = row < end
    # Pointers to the beginning of each line, int64: the matrices of all experts can have more than 2^31 numbers.
    line_words = stored + (line * (groups * SPAN))[:, None]
    line_inputs = x + (row.to(tl.int64) * x_row)[:, None]
    # Transposed, [COLUMNS, ROWS], in fp32. Two levels of sums: `product` within a step, `total` over scaled groups.
    total = tl.zeros([column.shape[0], ROWS], tl.float32)
    # A split whose range is empty stores zeros, which the sum over splits reads.
    for step in range(split * share, tl.minimum(split * share + share, steps)):
        # A step never crosses a group, so that it has one scale for each output feature.
        group = step // STEPS
        in_group = (step % STEPS) * WORDS + tl.arange(0, WORDS)
        read, counted = there[:, None], known[:, None]
        if SPAN % WORDS != 0:
            inside = (in_group < SPAN)[None, :]
            read, counted = read & inside, counted & inside
        words = tl.load(line_words + (group * SPAN + in_group)[None, :], mask=read, other=0.0)  # [COLUMNS, WORDS]
        scale = tl.load(scales + line * groups + group, mask=there, other=0.0)
        product = tl.zeros([column.shape[0], ROWS], tl.float32)
        sums = tl.zeros([ROWS], tl.float32)
        # int4: the same bits of all words are consecutive features, which `inputs` loads in one run. Masked features
        # are 0, so that what is stored for them does not count.
        for part in tl.static_range(PER_WORD):
            feature = group * GROUP + part * SPAN + in_group
            inputs = tl.load(line_inputs + feature[None, :], mask=counted & (feature < depth)[None, :], other=0.0)
            weights = _numbers_of(words, part, PER_WORD).to(x.dtype.element_ty)  # [COLUMNS, WORDS]
            product = tl.dot(weights, tl.trans(inputs), product, input_precision="ieee")
            if PER_WORD > 1:
                sums += tl.sum(inputs.to(tl.float32), 1)
        total += product * scale[:, None]
        if PER_WORD > 1:
            # sum x (16 + n) scale + (low - 16 scale) sum x = sum x (n scale + low)
            low = tl.load(lows + line * groups + group, mask=there, other=0.0) - 16.0 * scale
            total += low[:, None] * sums[None, :]
    if BIAS:
        total += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[:, None]
    # out [SPLITS, R, width]; with one split it is the result, in the dtype of x.
    place = (split.to(tl.int64) * rows + row)[:, None] * width + column[None, :]
    tl.store(out + place, tl.trans(total).to(out.dtype.element_ty), mask=known[:, None] & there[None, :])


@triton.jit
def _weight_only_product(
    x, stored, scales, lows, bias, ends, out, rows, width, depth, groups, x_row,
    GROUP: tl.constexpr, PER_WORD: tl.constexpr, BIAS: tl.constexpr, EXPERTS: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """x [R, depth]; stored [E, width, words], scales and lows [E, width, groups]; out [SPLITS, R, width].

    EXPERTS: the rows of x are in the order of experts, and end at `ends` [E]. The tile of W is the left operand: of the
    right one, the rows of x, an instruction of the tensor cores takes as few as there are.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2) % SPLITS
    # The third axis of the grid has experts and splits; only one of them is above 1 (see tiling).
    expert = (tl.program_id(2) // SPLITS).to(tl.int64)
    line = expert * width + column
    first = tl.program_id(1) * ROWS
    if EXPERTS:
        before = tl.load(ends + tl.maximum(expert - 1, 0))
        first += tl.where(expert > 0, before, 0)
        end = tl.load(ends + expert)
        # How many rows an expert has is on the device only. There are programs for the mean number; each takes every so
        # many tiles until the expert's end, and none where it has no rows.
        for start in range(first, end, tl.num_programs(1) * ROWS):
            _multiply_rows(
                x, stored, scales, lows, bias, out, start, end, split, line, column, rows, width, depth, groups, x_row,
                GROUP, PER_WORD, BIAS, SPLITS, ROWS, DEPTH,
            )  # fmt: skip
    else:  # without the loop, which takes registers
        _multiply_rows(
            x, stored, scales, lows, bias, out, first, rows, split, line, column, rows, width, depth, groups, x_row,
            GROUP, PER_WORD, BIAS, SPLITS, ROWS, DEPTH,
        )  # fmt: skip


@triton.jit
def _sum_of_splits(parts, bias, out, numbers, width, BIAS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """parts [SPLITS, numbers] in fp32 -> out [numbers], rows of `width`."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < numbers
    total = tl.zeros([BLOCK], tl.float32)
    # In this order always: results do not depend on which program ends first, as they would with atomic adds.
    for split in range(SPLITS):
        total += tl.load(parts + split * numbers + place, mask=there, other=0.0)
    if BIAS:
        total += tl.load(bias + place % width, mask=there, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _dequantize(
    stored, scales, lows, out, lines, depth, groups,
    GROUP: tl.constexpr, PER_WORD: tl.constexpr, LINES: tl.constexpr, LINE_WORDS: tl.constexpr,
):  # fmt: skip
    """stored [lines, words] -> out [lines, depth]"""
    SPAN: tl.constexpr = GROUP // PER_WORD
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)[:, None]
    word = tl.program_id(1) * LINE_WORDS + tl.arange(0, LINE_WORDS)[None, :]
    # Words of a line are stored group after group.
    group = word // SPAN
    there = (line < lines) & (group < groups)
    words = tl.load(stored + line * (groups * SPAN) + word, mask=there, other=0.0)
    scale = tl.load(scales + line * groups + group, mask=there, other=0.0)
    if PER_WORD > 1:
        low = tl.load(lows + line * groups + group, mask=there, other=0.0)
    for part in tl.static_range(PER_WORD):
        feature = group * GROUP + part * SPAN + word % SPAN
        number = (words >> (4 * part) & 15) if PER_WORD > 1 else words
        value = number.to(tl.float32) * scale
        if PER_WORD > 1:
            value += low
        tl.store(out + line * depth + feature, value.to(out.dtype.element_ty), mask=there & (feature < depth))


@dataclass(frozen=True)
class Tiling:
    """rows, depth: of a step of a program. row_tiles: programs for the rows of an expert. splits: of all depth."""

    rows: int
    depth: int
    row_tiles: int
    splits: int


@dataclass(frozen=True)
class Sizes:
    """Sizes of a product. rows: of all experts. itemsize: bytes of an input. bits: of a stored number."""

    rows: int
    width: int
    groups: int
    group: int
    experts: int
    itemsize: int
    bits: int


def tiling(sizes: Sizes, processors: int) -> Tiling:
    rows_of_expert = triton.cdiv(sizes.rows, sizes.experts)
    # A step is no longer than a group, and at least 16 words, the least that tl.dot takes. Inputs of 32 bits take half
    # the features, for the same bytes.
    depth = min(DEPTH * 2 // sizes.itemsize, max(triton.next_power_of_2(sizes.group), 16 * PER_WORD[sizes.bits]))
    # From 16, as tl.dot demands, to 64 with inputs of 16 bits and 32 with those of 32.
    rows = min(max(triton.next_power_of_2(rows_of_expert), 16), 128 // sizes.itemsize)
    row_tiles = triton.cdiv(rows_of_expert, rows)
    programs = triton.cdiv(sizes.width, COLUMNS[sizes.bits]) * row_tiles * sizes.experts
    steps = sizes.groups * triton.cdiv(sizes.group, depth)
    # Parts of sums are written and read, 8 bytes each: at most a quarter of the bytes of the weights.
    few_bytes = sizes.groups * sizes.group * sizes.bits // (256 * sizes.rows)
    wanted = min(PROGRAMS_PER_PROCESSOR * processors // programs, steps // LEAST_STEPS, few_bytes)
    # The largest power of 2 up to `wanted`. SPLITS is a constant of the compiled kernel: each number is compiled by
    # itself.
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
    # Parts stay in fp32 until they are added up, and the bias is added once, to their sum.
    is_split = tile.splits > 1
    parts = x.new_empty(tile.splits, rows, width, dtype=torch.float32) if is_split else out
    with on_device(x):
        _weight_only_product[(triton.cdiv(width, COLUMNS[bits]), tile.row_tiles, experts * tile.splits)](
            x, values, scales, lows, bias, ends, parts, rows, width, depth, groups, x.stride(0),
            group, PER_WORD[bits], bias is not None and not is_split, ends is not None, tile.splits,
            tile.rows, COLUMNS[bits], tile.depth, num_warps=4, num_stages=STAGES,
        )  # fmt: skip
        if is_split:
            _sum_of_splits[(triton.cdiv(out.numel(), SUM_BLOCK),)](
                parts, bias, out, out.numel(), width, bias is not None, tile.splits, SUM_BLOCK, num_warps=4
            )
    return out


def triton_dequantize(stored: Stored, group: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Dequantizes like mt_infer.quantization.groups.dequantize, in one pass over memory: [..., columns] in dtype."""
    values, scales, lows = _operands(stored)
    out = scales.new_empty(*scales.shape[:-1], columns, dtype=dtype)
    lines, per_word = out.numel() // columns, PER_WORD[8 if lows is None else 4]
    with on_device(out):
        _dequantize[(triton.cdiv(lines, LINES), triton.cdiv(values.shape[-1], LINE_WORDS))](
            values, scales, lows, out, lines, columns, scales.shape[-1], group, per_word, LINES, LINE_WORDS, num_warps=4
        )
    return out


def _operands(stored: Stored) -> tuple[Tensor, Tensor, Tensor | None]:
    """Bytes of FP8 as numbers of FP8; lows for int4."""
    values, scales, *lows = (part.contiguous() for part in stored)
    # Stored as bytes, see quantize_fp8; the kernel's pointer has the type of the numbers.
    if values.dtype == torch.uint8 and not lows:
        values = values.view(torch.float8_e4m3fn)
    return values, scales, lows[0] if lows else None
