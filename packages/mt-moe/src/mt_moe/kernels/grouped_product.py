"""Grouped GEMM in Triton: rows in the order of experts times a matrix for each expert.

A program computes one tile of the output. It finds its group from the groups' end offsets on the device, so there is
no host synchronization: the grid has room for the last, partly filled tile of every group.

Rows can be read from and written to other places than their own: `gather` holds for each row the one of the input, and
`scatter` the one of the output. -1: a row of zeros, and a result that is not written. So tokens are permuted while they
are loaded and stored, and no permuted copy of them exists.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.main_grad import MainGrad
from mt_moe.kernels.tiles import ANY_FORMAT, OUTER, ROWS, WHOLE_DEPTH, Tile, is_timed

BAND = tl.constexpr(8)
"""So many row tiles take their column tiles in turn, so that both operands stay in the L2 cache."""


@triton.autotune(
    configs=[tile.config() for tile in ROWS],
    key=["mean_rows", "groups", "width", "depth", "m_depth_stride", "GATHER", "SCATTER"],
)
@triton.jit
def _grouped_gemm(  # type: ignore[no-untyped-def]
    x, gather, matrices, out, scatter, ends, rows_in_all, mean_rows, groups, width, depth, x_stride,
    m_stride, m_depth_stride, m_column_stride,
    GROUPS: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr, WHOLE: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out[scatter[r]] = x[gather[r]] @ matrices[group of r]; matrices [groups, depth, width] by their strides.

    mean_rows: of a group, rounded up to a power of two; timings are kept by it. GROUPS: a power of two that is at least
    `groups`. WHOLE: every step along `depth` is a whole one.
    """
    row_tiles, column_tiles = tl.cdiv(rows_in_all, ROWS) + groups, tl.cdiv(width, COLUMNS)
    band, place = tl.program_id(0) // (BAND * column_tiles), tl.program_id(0) % (BAND * column_tiles)
    height = min(row_tiles - band * BAND, BAND)
    tile, column_tile = band * BAND + place % height, place // height

    numbers = tl.arange(0, GROUPS)
    stops = tl.load(ends + numbers, mask=numbers < groups, other=0)
    starts = tl.load(ends + numbers - 1, mask=(numbers > 0) & (numbers < groups), other=0)
    tiles = (stops - starts + ROWS - 1) // ROWS
    tiles_until = tl.cumsum(tiles, 0)
    found = (tile < tiles_until) & (tile >= tiles_until - tiles)
    if tile < tl.sum(tiles, 0):
        group = tl.sum(tl.where(found, numbers, 0), 0)
        first = tl.sum(tl.where(found, starts + (tile - tiles_until + tiles) * ROWS, 0), 0)
        end = tl.sum(tl.where(found, stops, 0), 0)
        rows = first + tl.arange(0, ROWS)
        valid = rows < end
        sources = rows.to(tl.int64)
        if GATHER:
            sources = tl.load(gather + rows, mask=valid, other=-1)
            here = sources >= 0
        else:
            here = valid
        columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        inner = tl.arange(0, DEPTH)
        left_places = x + sources[:, None] * x_stride + inner[None, :]
        right_places = (
            matrices
            + group.to(tl.int64) * m_stride
            + inner[:, None].to(tl.int64) * m_depth_stride
            + columns[None, :].to(tl.int64) * m_column_stride
        )
        total = tl.zeros((ROWS, COLUMNS), dtype=DTYPE)
        for at in range(0, depth, DEPTH):
            if WHOLE:
                left = tl.load(left_places, mask=here[:, None], other=0.0)
                right = tl.load(right_places, mask=columns[None, :] < width, other=0.0)
            else:
                left = tl.load(left_places, mask=here[:, None] & (inner[None, :] < depth - at), other=0.0)
                right = tl.load(
                    right_places, mask=(inner[:, None] < depth - at) & (columns[None, :] < width), other=0.0
                )
            total = tl.dot(left, right, total, input_precision="ieee", out_dtype=DTYPE)
            left_places += DEPTH
            right_places += DEPTH * m_depth_stride
        targets = rows.to(tl.int64)
        if SCATTER:
            targets = tl.load(scatter + rows, mask=valid, other=-1)
            valid = targets >= 0
        tl.store(
            out + targets[:, None] * width + columns[None, :],
            total.to(out.dtype.element_ty),
            mask=valid[:, None] & (columns[None, :] < width),
        )


@triton.autotune(configs=[tile.config() for tile in OUTER], key=["mean_rows", "groups", "height", "width"])
@triton.jit
def _grouped_gemm_outer(  # type: ignore[no-untyped-def]
    left, left_gather, right, right_gather, out, ends, mean_rows, groups, height, width,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, ADD: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out[g] = left[rows of g]^T @ right[rows of g]: [groups, height, width]; zeros for a group without rows.

    LEFT, RIGHT: that operand's rows are gathered. ADD: accumulate into out[g]. Tiles of one group are adjacent in the
    grid, so that their operands stay in the cache.
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
        valid = rows < end
        left_rows, right_rows = rows.to(tl.int64), rows.to(tl.int64)
        left_valid, right_valid = valid, valid
        if LEFT:
            left_rows = tl.load(left_gather + rows, mask=valid, other=-1)
            left_valid = left_rows >= 0
        if RIGHT:
            right_rows = tl.load(right_gather + rows, mask=valid, other=-1)
            right_valid = right_rows >= 0
        a = tl.load(
            left + left_rows[None, :] * height + down[:, None],
            mask=left_valid[None, :] & (down[:, None] < height),
            other=0.0,
        )
        b = tl.load(
            right + right_rows[:, None] * width + across[None, :],
            mask=right_valid[:, None] & (across[None, :] < width),
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision="ieee", out_dtype=DTYPE)
    places = out + group.to(tl.int64) * height * width + down[:, None].to(tl.int64) * width + across[None, :]
    there = (down[:, None] < height) & (across[None, :] < width)
    if ADD:
        # Atomic adds: there are no registers left to load the old values. No two programs write the same element.
        if start < end:
            tl.atomic_add(places, total, mask=there, sem="relaxed")
    else:
        tl.store(places, total.to(out.dtype.element_ty), mask=there)


def rows_times(
    x: Tensor,
    matrices: Tensor,
    ends: Tensor,
    *,
    gather: Tensor | None = None,
    scatter: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [R, a], matrices [E, a, b] in any strides, ends [E] int32 -> [R, b].

    gather: [R] int64, rows of x [n, a]. scatter: [R] int64, rows of `out` [m, b]; its other rows stay as they are.
    """
    x = x.contiguous()
    rows = len(x) if gather is None else len(gather)
    groups, depth, width = matrices.shape
    if out is None:
        out = x.new_empty(rows, width)
    if not rows or not width:
        return out
    tile = None if is_timed(x) else ANY_FORMAT if x.element_size() > 2 else ROWS[0]
    arguments = (
        x, gather, matrices, out, scatter, ends, rows, _mean(rows, groups), groups, width, depth, x.stride(0),
        *matrices.stride(),
    )  # fmt: skip
    _launch(
        _grouped_gemm,
        lambda meta: (
            (triton.cdiv(rows, meta["ROWS"]) + groups) * triton.cdiv(width, meta["COLUMNS"]),
        ),
        tile, *arguments, GROUPS=triton.next_power_of_2(groups), GATHER=gather is not None,
        SCATTER=scatter is not None, WHOLE=depth % WHOLE_DEPTH == 0, DTYPE=_accumulator(x),
    )  # fmt: skip
    return out


def outer_products(
    left: Tensor,
    right: Tensor,
    ends: Tensor,
    *,
    left_gather: Tensor | None = None,
    right_gather: Tensor | None = None,
) -> Tensor:
    """left [R, a], right [R, b], ends [E] int32 -> [E, a, b]. Rows of either may be gathered: [R] int64."""
    out = left.new_empty(len(ends), left.shape[1], right.shape[1])
    tile = None if is_timed(left) else ANY_FORMAT if left.element_size() > 2 else OUTER[0]
    _outer(left, left_gather, right, right_gather, out, ends, tile, add=False)
    return out


def add_outer_products(
    main: MainGrad,
    left: Tensor,
    right: Tensor,
    ends: Tensor,
    *,
    left_gather: Tensor | None = None,
    right_gather: Tensor | None = None,
) -> None:
    """main [E, a, b] += left^T right of each group; left [R, a], right [R, b] in 16 bits, ends [E] int32. If it was
    cleared, they are written over what is there.

    Not timed: each call would add.
    """
    total, is_cleared = main.take()
    _outer(left, left_gather, right, right_gather, total, ends, OUTER[0], add=not is_cleared)


def _outer(
    left: Tensor, left_gather: Tensor | None, right: Tensor, right_gather: Tensor | None, out: Tensor, ends: Tensor,
    tile: Tile | None, *, add: bool,
) -> None:  # fmt: skip
    groups, height, width = out.shape
    rows = len(left) if left_gather is None else len(left_gather)
    _launch(
        _grouped_gemm_outer,
        lambda meta: (triton.cdiv(width, meta["COLUMNS"]), triton.cdiv(height, meta["ROWS"]), groups),
        tile, left.contiguous(), left_gather, right.contiguous(), right_gather, out, ends, _mean(rows, groups), groups,
        height, width, LEFT=left_gather is not None, RIGHT=right_gather is not None, ADD=add, DTYPE=_accumulator(left),
    )  # fmt: skip


def _launch(kernel: Any, grid: Any, tile: Tile | None, *arguments: Any, **constants: Any) -> None:
    """tile: None takes the one that was fastest when the shape was first seen."""
    if tile is None:
        kernel[grid](*arguments, **constants)
    else:
        kernel.fn[grid](*arguments, **constants, **tile.constants())


def _mean(rows: int, groups: int) -> int:
    """Rows of a group, so roughly that few shapes are timed."""
    return int(triton.next_power_of_2(triton.cdiv(rows, groups)))


def _accumulator(x: Tensor) -> tl.dtype:
    return tl.float64 if x.element_size() == 8 else tl.float32
