"""Grouped GEMM in Triton: rows in the order of experts times a matrix for each expert.

A program computes one tile of the output. It finds its group from the groups' end offsets on the device, so there is
no host synchronization: the grid has room for the last, partly filled tile of every group.

Rows can be read from and written to other places than their own: `gather` holds for each row the one of the input, and
`scatter` the one of the output. -1: a row of zeros, and a result that is not written. So tokens are permuted while they
are loaded and stored, and no permuted copy of them exists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mt_core.nn.main_grad import MainGrad
from mt_moe.kernels.tiles import (
    OUTER,
    ROWS,
    WHOLE_DEPTH,
    Tile,
    ceil_div,
    describe,
    is_timed,
    mean_rows,
    next_power_of_2,
    not_mostly_empty,
    resident_programs,
    untimed_tile,
)

BAND = tl.constexpr(8)
"""So many row tiles take their column tiles in turn, so that both operands stay in the L2 cache."""


def set_blocks_of_rows(arguments: dict[str, Any]) -> None:
    """The blocks of descriptors are those of the tile."""
    rows, columns, depth = (arguments[name] for name in ("ROWS", "COLUMNS", "DEPTH"))
    if arguments["X_TMA"]:
        arguments["x_tma"].block_shape = [rows, depth]
    if arguments["M_TMA"]:
        block = [columns, depth] if arguments["TRANSPOSED"] else [depth, columns]
        arguments["matrices_tma"].block_shape = [1, *block]


def set_blocks_of_outer(arguments: dict[str, Any]) -> None:
    if arguments["LEFT_TMA"]:
        arguments["left_tma"].block_shape = [arguments["DEPTH"], arguments["ROWS"]]
    if arguments["RIGHT_TMA"]:
        arguments["right_tma"].block_shape = [arguments["DEPTH"], arguments["COLUMNS"]]


def not_mostly_empty_configs(
    configs: list[triton.Config], positional: dict[str, Any], **arguments: Any
) -> list[triton.Config]:
    """See not_mostly_empty."""
    return [config for config in configs if config.kwargs["ROWS"] <= arguments["mean_rows"]]


@triton.autotune(
    configs=[tile.config(set_blocks_of_rows) for tile in ROWS],
    key=["mean_rows", "groups", "width", "depth", "TRANSPOSED", "GATHER", "SCATTER", "X_TMA", "M_TMA"],
    prune_configs_by={"early_config_prune": not_mostly_empty_configs},
)
@triton.jit
def _grouped_gemm(  # type: ignore[no-untyped-def]
    x, x_tma, gather, matrices, matrices_tma, out, scatter, ends, mean_rows, groups, width, depth, x_stride,
    m_stride, m_line_stride,
    GROUPS: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr, TRANSPOSED: tl.constexpr, WHOLE: tl.constexpr,
    X_TMA: tl.constexpr, M_TMA: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out[scatter[r]] = x[gather[r]] @ matrices[group of r]; matrices [groups, depth, width], or [groups, width, depth]
    if TRANSPOSED, with m_line_stride elements from one line of a matrix to the next.

    x_tma, matrices_tma: tensor descriptors of the same memory with blocks of a tile, read if X_TMA, M_TMA. mean_rows:
    see tiles.mean_rows; timings are kept by it. GROUPS: a power of two that is at least `groups`. WHOLE: every step
    along `depth` is a whole one.
    """
    # [GROUPS] vectors, one lane a group. ends 3 3 300 with ROWS = 128: starts 0 3 3, tiles 1 0 3, tiles_until 1 1 4.
    # Tile 2 is then the second of group 2, rows 131 to 258.
    numbers = tl.arange(0, GROUPS)
    stops = tl.load(ends + numbers, mask=numbers < groups, other=0)
    starts = tl.load(ends + numbers - 1, mask=(numbers > 0) & (numbers < groups), other=0)
    tiles = (stops - starts + ROWS - 1) // ROWS
    tiles_until = tl.cumsum(tiles, 0)
    row_tiles, column_tiles = tl.sum(tiles, 0), tl.cdiv(width, COLUMNS)
    band_tiles = column_tiles * BAND
    # Persistent programs: there may be more tiles than programs run at a time.
    for place in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        # Within a band of up to BAND row tiles the row index runs fastest, so that neighbouring programs share a column
        # tile of the matrix, and the band's rows are read again for the next column tile while they are in the cache.
        band, in_band = place // band_tiles, place % band_tiles
        height = min(row_tiles - band * BAND, BAND)
        tile, column = band * BAND + in_band % height, in_band // height * COLUMNS

        # True in one lane: a group without rows has no tiles. The sums below select that lane's value.
        is_group = (tile < tiles_until) & (tile >= tiles_until - tiles)
        group = tl.sum(tl.where(is_group, numbers, 0), 0)
        first = tl.sum(tl.where(is_group, starts + (tile - tiles_until + tiles) * ROWS, 0), 0)
        end = tl.sum(tl.where(is_group, stops, 0), 0)
        rows = first + tl.arange(0, ROWS)
        valid = rows < end
        here = valid
        # 64 bits: row * stride passes 2**31 elements in large layers.
        sources = rows.to(tl.int64)
        if GATHER:
            sources = tl.load(gather + rows, mask=valid, other=-1)
            here = sources >= 0
        columns = column + tl.arange(0, COLUMNS)
        inner = tl.arange(0, DEPTH)
        left_places = x + sources[:, None] * x_stride + inner[None, :]
        right_places = matrices + group.to(tl.int64) * m_stride
        if TRANSPOSED:
            right_places += inner[:, None] + columns[None, :].to(tl.int64) * m_line_stride
        else:
            right_places += inner[:, None].to(tl.int64) * m_line_stride + columns[None, :]
        total = tl.zeros((ROWS, COLUMNS), dtype=DTYPE)
        for at in range(0, depth, DEPTH):
            # A block may reach into the rows of the next group. Their products are computed and not stored (`valid`).
            # Outside of the tensor TMA reads zeros.
            if X_TMA:
                left = x_tma.load([first, at])
            elif WHOLE:
                left = tl.load(left_places, mask=here[:, None], other=0.0)
            else:
                left = tl.load(left_places, mask=here[:, None] & (inner[None, :] < depth - at), other=0.0)
            if M_TMA:
                if TRANSPOSED:
                    right = matrices_tma.load([group, column, at]).reshape(COLUMNS, DEPTH).T
                else:
                    right = matrices_tma.load([group, at, column]).reshape(DEPTH, COLUMNS)
            elif WHOLE:
                right = tl.load(right_places, mask=columns[None, :] < width, other=0.0)
            else:
                right = tl.load(
                    right_places, mask=(inner[:, None] < depth - at) & (columns[None, :] < width), other=0.0
                )
            # "ieee": fp32 operands are multiplied as fp32 and not as TF32.
            total = tl.dot(left, right, total, input_precision="ieee", out_dtype=DTYPE)
            left_places += DEPTH
            right_places += DEPTH if TRANSPOSED else DEPTH * m_line_stride
        targets = rows.to(tl.int64)
        if SCATTER:
            targets = tl.load(scatter + rows, mask=valid, other=-1)
            valid = targets >= 0
        tl.store(
            out + targets[:, None] * width + columns[None, :],
            total.to(out.dtype.element_ty),
            mask=valid[:, None] & (columns[None, :] < width),
        )


@triton.jit
def _grouped_gemm_outer(  # type: ignore[no-untyped-def]
    left, left_tma, left_gather, right, right_tma, right_gather, out, ends, mean_rows, groups, height, width,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, LEFT_TMA: tl.constexpr, RIGHT_TMA: tl.constexpr, ADD: tl.constexpr,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out[g] = left[rows of g]^T @ right[rows of g]: [groups, height, width]; zeros for a group without rows.

    LEFT, RIGHT: that operand's rows are gathered. LEFT_TMA, RIGHT_TMA: all steps but the last read it by its tensor
    descriptor; the last one is masked, as the next group's rows follow. ADD: accumulate into out[g]. Tiles of one group
    are adjacent in the grid, so that their operands stay in the cache.
    """
    # The grid is (column tiles, row tiles, groups).
    group = tl.program_id(2)
    start = 0
    if group > 0:
        start = tl.load(ends + group - 1)
    end = tl.load(ends + group)
    row, column = tl.program_id(1) * ROWS, tl.program_id(0) * COLUMNS
    down = row + tl.arange(0, ROWS)
    across = column + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=DTYPE)
    # Without TMA every step is masked.
    masked_from = start
    if LEFT_TMA or RIGHT_TMA:
        # The first step that would include rows of the next group.
        masked_from = end - (end - start) % DEPTH
        for at in range(start, masked_from, DEPTH):
            if LEFT_TMA:
                a = left_tma.load([at, row]).T
            else:
                a = _rows_of(left, left_gather, at, end, down, height, LEFT, DEPTH).T
            if RIGHT_TMA:
                b = right_tma.load([at, column])
            else:
                b = _rows_of(right, right_gather, at, end, across, width, RIGHT, DEPTH)
            total = tl.dot(a, b, total, input_precision="ieee", out_dtype=DTYPE)
    for at in range(masked_from, end, DEPTH):
        a = _rows_of(left, left_gather, at, end, down, height, LEFT, DEPTH).T
        b = _rows_of(right, right_gather, at, end, across, width, RIGHT, DEPTH)
        total = tl.dot(a, b, total, input_precision="ieee", out_dtype=DTYPE)
    # [ROWS, COLUMNS] addresses in [groups, height, width]
    places = out + group.to(tl.int64) * height * width + down[:, None].to(tl.int64) * width + across[None, :]
    there = (down[:, None] < height) & (across[None, :] < width)
    if ADD:
        # Atomic adds: there are no registers left to load the old values. No two programs write the same element.
        if start < end:
            tl.atomic_add(places, total, mask=there, sem="relaxed")
    else:
        tl.store(places, total.to(out.dtype.element_ty), mask=there)


_OUTER_KEY = ["mean_rows", "groups", "height", "width", "LEFT", "RIGHT", "LEFT_TMA", "RIGHT_TMA"]
_timed_outer = triton.autotune([tile.config(set_blocks_of_outer) for tile in OUTER], _OUTER_KEY)(_grouped_gemm_outer)
_timed_gathering_outer = triton.autotune([tile.gathering().config(set_blocks_of_outer) for tile in OUTER], _OUTER_KEY)(
    _grouped_gemm_outer
)


@triton.jit
def _rows_of(  # type: ignore[no-untyped-def]
    x, gather, first, end, columns, width, GATHER: tl.constexpr, COUNT: tl.constexpr
):
    """[COUNT, columns]: rows from `first` on of x [_, width], or those that `gather` has; zeros from row `end` on."""
    rows = first + tl.arange(0, COUNT)
    valid = rows < end
    sources = rows.to(tl.int64)
    if GATHER:
        sources = tl.load(gather + rows, mask=valid, other=-1)
        valid = sources >= 0
    places = x + sources[:, None] * width + columns[None, :]
    return tl.load(places, mask=valid[:, None] & (columns[None, :] < width), other=0.0)


def rows_times(
    x: Tensor,
    matrices: Tensor,
    ends: Tensor,
    *,
    gather: Tensor | None = None,
    scatter: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [R, a], matrices [E, a, b] or the transposed view of [E, b, a], ends [E] int32 -> [R, b].

    gather: [R] int64, rows of x [n, a]. scatter: [R] int64, rows of `out` [m, b]; its other rows stay as they are.
    """
    x = x.contiguous()
    rows = len(x) if gather is None else len(gather)
    groups, depth, width = matrices.shape
    if out is None:
        out = x.new_empty(rows, width)
    if not rows or not width:
        return out
    # Forward passes weight.mT, a view of [E, out, in]: the kernel reads it as it lies in memory, without a copy.
    is_transposed = matrices.stride(1) == 1
    lines = matrices.mT if is_transposed else matrices
    if lines.stride(2) != 1:
        lines = lines.contiguous()
    x_tma, matrices_tma = None if gather is not None else describe(x), describe(lines)
    mean = mean_rows(rows, groups)
    arguments = {
        "x": x, "x_tma": x_tma, "gather": gather, "matrices": lines, "matrices_tma": matrices_tma, "out": out,
        "scatter": scatter, "ends": ends, "mean_rows": mean, "groups": groups, "width": width, "depth": depth,
        "x_stride": x.stride(0), "m_stride": lines.stride(0), "m_line_stride": lines.stride(1),
        "GROUPS": next_power_of_2(groups), "GATHER": gather is not None, "SCATTER": scatter is not None,
        "TRANSPOSED": is_transposed, "WHOLE": depth % WHOLE_DEPTH == 0, "X_TMA": x_tma is not None,
        "M_TMA": matrices_tma is not None, "DTYPE": _accumulator(x),
    }  # fmt: skip

    def grid(meta: dict[str, Any]) -> tuple[int]:
        # An upper bound, as the host does not read `ends`: each group has at most one partly filled tile.
        most = (ceil_div(rows, meta["ROWS"]) + groups) * ceil_div(width, meta["COLUMNS"])
        return (min(most, resident_programs(x, meta)),)

    if is_timed(x):
        _grouped_gemm[grid](**arguments)
    else:
        tile = untimed_tile(not_mostly_empty(ROWS, mean), x)
        _launch_untimed(_grouped_gemm.fn, grid, tile, arguments, set_blocks_of_rows)
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
    _outer(left, left_gather, right, right_gather, out, ends, timed=is_timed(left), add=False)
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
    # The kernel writes zeros for groups without rows, so a cleared total needs no zeroing before.
    total, is_cleared = main.take()
    _outer(left, left_gather, right, right_gather, total, ends, timed=False, add=not is_cleared)


def _outer(
    left: Tensor, left_gather: Tensor | None, right: Tensor, right_gather: Tensor | None, out: Tensor, ends: Tensor,
    *, timed: bool, add: bool,
) -> None:  # fmt: skip
    groups, height, width = out.shape
    rows = len(left) if left_gather is None else len(left_gather)
    left, right = left.contiguous(), right.contiguous()
    left_tma = None if left_gather is not None else describe(left)
    right_tma = None if right_gather is not None else describe(right)
    arguments = {
        "left": left, "left_tma": left_tma, "left_gather": left_gather, "right": right, "right_tma": right_tma,
        "right_gather": right_gather, "out": out, "ends": ends, "mean_rows": mean_rows(rows, groups), "groups": groups,
        "height": height, "width": width, "LEFT": left_gather is not None, "RIGHT": right_gather is not None,
        "LEFT_TMA": left_tma is not None, "RIGHT_TMA": right_tma is not None, "ADD": add, "DTYPE": _accumulator(left),
    }  # fmt: skip

    def grid(meta: dict[str, Any]) -> tuple[int, int, int]:
        return ceil_div(width, meta["COLUMNS"]), ceil_div(height, meta["ROWS"]), groups

    gathers = left_gather is not None or right_gather is not None
    if timed:
        (_timed_gathering_outer if gathers else _timed_outer)[grid](**arguments)
    else:
        tile = untimed_tile(OUTER, left)
        tile = tile.gathering() if gathers else tile
        _launch_untimed(_grouped_gemm_outer, grid, tile, arguments, set_blocks_of_outer)


def _launch_untimed(
    kernel: Any, grid: Any, tile: Tile, arguments: dict[str, Any], prepare: Callable[[dict[str, Any]], None]
) -> None:
    # What autotune does through pre_hook.
    prepare({**arguments, **tile.sizes()})
    kernel[grid](**arguments, **tile.constants())


def _accumulator(x: Tensor) -> tl.dtype:
    return tl.float64 if x.element_size() == 8 else tl.float32
