"""Grouped GEMM in Triton: rows in the order of experts times a matrix for each expert.

A program computes one tile of the output. It finds its group from the groups' end offsets on the device, so there is
no host synchronization: the grid has room for the last, partly filled tile of every group.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """The tile of a program, [rows, columns], in steps of `depth` along the reduction."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    """Pipelined steps, whose operands are in shared memory or being loaded."""


ANY_FORMAT = Tile(rows=64, columns=64, depth=32, warps=4, stages=3)
SIXTEEN_BITS = Tile(rows=128, columns=256, depth=32, warps=8, stages=4)
"""Larger tiles read operands fewer times. Compiled for Hopper, this one takes 202 of 255 registers and spills none;
every GPU since Ampere has enough shared memory for it."""


@triton.jit
def _grouped_gemm(  # type: ignore[no-untyped-def]
    x, matrices, out, ends, width, depth, x_stride, m_stride, m_depth_stride, m_column_stride,
    GROUPS: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out[r] = x[r] @ matrices[group of r]; matrices [groups, depth, width] by their strides."""
    tile = tl.program_id(0)
    group, first, start, end = -1, 0, 0, 0
    tiles_before = 0
    for candidate in range(GROUPS):
        stop = tl.load(ends + candidate)
        tiles = (stop - start + ROWS - 1) // ROWS
        found = (tile >= tiles_before) & (tile < tiles_before + tiles)
        group = tl.where(found, candidate, group)
        first = tl.where(found, start + (tile - tiles_before) * ROWS, first)
        end = tl.where(found, stop, end)
        tiles_before += tiles
        start = stop
    if group >= 0:
        rows = first + tl.arange(0, ROWS)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), dtype=DTYPE)
        for at in range(0, depth, DEPTH):
            inner = at + tl.arange(0, DEPTH)
            left = tl.load(
                x + rows[:, None].to(tl.int64) * x_stride + inner[None, :],
                mask=(rows[:, None] < end) & (inner[None, :] < depth),
                other=0.0,
            )
            right = tl.load(
                matrices
                + tl.cast(group, tl.int64) * m_stride
                + inner[:, None].to(tl.int64) * m_depth_stride
                + columns[None, :] * m_column_stride,
                mask=(inner[:, None] < depth) & (columns[None, :] < width),
                other=0.0,
            )
            total += tl.dot(left, right, input_precision="ieee").to(DTYPE)
        tl.store(
            out + rows[:, None].to(tl.int64) * width + columns[None, :],
            total,
            mask=(rows[:, None] < end) & (columns[None, :] < width),
        )


@triton.jit
def _grouped_gemm_outer(  # type: ignore[no-untyped-def]
    left, right, out, ends, height, width,
    ADD: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out[g] = left[rows of g]^T @ right[rows of g]: [groups, height, width]; zeros for a group without rows.

    ADD: accumulate into out[g]. Tiles of one group are adjacent in the grid, so that their operands stay in the cache.
    """
    group = tl.program_id(2)
    start = 0
    if group > 0:
        start = tl.load(ends + group - 1)
    end = tl.load(ends + group)
    down = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    across = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=DTYPE)
    for at in range(start, end, DEPTH):
        rows = at + tl.arange(0, DEPTH)
        a = tl.load(
            left + rows[None, :].to(tl.int64) * height + down[:, None],
            mask=(rows[None, :] < end) & (down[:, None] < height),
            other=0.0,
        )
        b = tl.load(
            right + rows[:, None].to(tl.int64) * width + across[None, :],
            mask=(rows[:, None] < end) & (across[None, :] < width),
            other=0.0,
        )
        total += tl.dot(a, b, input_precision="ieee").to(DTYPE)
    places = out + group.to(tl.int64) * height * width + down[:, None].to(tl.int64) * width + across[None, :]
    there = (down[:, None] < height) & (across[None, :] < width)
    if ADD:
        # Atomic adds: there are no registers left to load the old values. No two programs write the same element.
        if start < end:
            tl.atomic_add(places, total, mask=there, sem="relaxed")
    else:
        tl.store(places, total, mask=there)


def rows_times(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """x [R, a], matrices [E, a, b] in any strides, ends [E] int32 -> [R, b]"""
    x = x.contiguous()
    groups, depth, width = matrices.shape
    out = x.new_empty(len(x), width)
    if out.numel():
        tile = ANY_FORMAT
        grid = (triton.cdiv(len(x), tile.rows) + groups, triton.cdiv(width, tile.columns))
        _grouped_gemm[grid](
            x, matrices, out, ends, width, depth, x.stride(0), *matrices.stride(), GROUPS=groups,
            DTYPE=_accumulator(x), ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip
    return out


def outer_products(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """left [R, a], right [R, b], ends [E] int32 -> [E, a, b]"""
    out = left.new_empty(len(ends), left.shape[1], right.shape[1])
    _outer(left, right, out, ends, ANY_FORMAT, add=False)
    return out


def add_outer_products(total: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> None:
    """total [E, a, b] in fp32 += left^T right of each group; left [R, a], right [R, b] in 16 bits, ends [E] int32"""
    _outer(left, right, total, ends, SIXTEEN_BITS, add=True)


def _outer(left: Tensor, right: Tensor, out: Tensor, ends: Tensor, tile: Tile, *, add: bool) -> None:
    left, right = left.contiguous(), right.contiguous()
    groups, height, width = out.shape
    grid = (triton.cdiv(width, tile.columns), triton.cdiv(height, tile.rows), groups)
    _grouped_gemm_outer[grid](
        left, right, out, ends, height, width, ADD=add, DTYPE=_accumulator(left), ROWS=tile.rows,
        COLUMNS=tile.columns, DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _accumulator(x: Tensor) -> tl.dtype:
    return tl.float64 if x.element_size() == 8 else tl.float32
