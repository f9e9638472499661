"""Devices, warps and tiles of rows of the kernels' launches."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import triton
from torch import Tensor


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def multiprocessors(x: Tensor) -> int:
    """Multiprocessors of x's device; a small number in the interpreter."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.device.type == "cuda" else 4


def warps_for(elements: int) -> int:
    """Warps of a program that holds a tile of this many elements: 8 or more of them a thread, up to 32 warps."""
    # 512 = 32 threads of a warp x 16 elements. Under 4 warps a program does not fill the four schedulers of a
    # multiprocessor; 32 warps are CUDA's largest block of 1024 threads.
    return min(max(elements // 512, 4), 32)


# -- tiles: how a matrix [rows, width] is divided over programs that hold whole rows ----------------------

_TILE = 2048
"""Elements under which a program takes several rows."""
_PROGRAMS_PER_MULTIPROCESSOR = 4
WIDE_BLOCK = 4096
"""Columns at a time of kernels that loop over the columns of rows too wide for registers."""
WIDE_WARPS = 16
_WIDE_ROWS = 2


@dataclass(frozen=True)
class RowTiles:
    """rows and block: of a tile, powers of two. count: tiles. programs: of a pass whose programs keep sums over their
    rows, each taking per_program tiles."""

    rows: int
    block: int
    count: int
    programs: int
    per_program: int
    warps: int

    @classmethod
    def of(cls, matrix: Tensor, width: int) -> RowTiles:
        """width: of the matrix, from a parameter. torch.compile takes sizes of parameters as constants, as a kernel's
        block and warps must be; those of activations become symbols once a process has compiled two widths."""
        # tl.arange requires a power of two; the columns behind `width` are masked.
        block = triton.next_power_of_2(max(width, 1))
        # Narrow rows share a program: of 128 columns it takes 16, as one row would be less work than a launch of the
        # program costs.
        rows = max(_TILE // block, 1)
        count = triton.cdiv(len(matrix), rows)
        # As many programs as run at once, each with a run of neighbouring tiles, so that the partial sums [programs,
        # width] do not grow with the number of rows. 4 programs of block 8192 (16 warps each), the widest of such a
        # pass, are the 64 warps that a multiprocessor of an A100 or H100 holds.
        busy = multiprocessors(matrix) * _PROGRAMS_PER_MULTIPROCESSOR
        per_program = max(triton.cdiv(count, busy), 1)
        # Rounded up twice: the last program may have fewer tiles, but none has no tile, as each writes its partial
        # sums.
        return cls(rows, block, count, triton.cdiv(count, per_program), per_program, warps_for(rows * block))

    @classmethod
    def by_columns(cls, matrix: Tensor) -> RowTiles:
        """For a pass that loops over blocks of columns. It keeps its sums over rows in memory: with one program a
        multiprocessor these stay in the L2 cache."""
        count = triton.cdiv(len(matrix), _WIDE_ROWS)
        per_program = max(triton.cdiv(count, multiprocessors(matrix)), 1)
        return cls(_WIDE_ROWS, WIDE_BLOCK, count, triton.cdiv(count, per_program), per_program, WIDE_WARPS)


def rows_of(x: Tensor) -> Tensor:
    """[..., width] -> [rows, width], contiguous"""
    return x.reshape(-1, x.shape[-1]).contiguous()
