"""The tiles of the grouped GEMM, of which the fastest is found when a shape is first multiplied.

The result has the same bits whatever the tile: none splits a reduction, and all add up steps of 16, those of a tensor
core's instruction, in the same order. So ranks and runs may take different tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mt_moe.kernels.availability import is_interpreted

# -- operands of Hopper's tensor memory accelerator (TMA), and their descriptors ---------------------
#
# It copies a rectangular tile for one instruction of one thread, fills with zeros what lies outside of the tensor, and
# needs lines that begin at multiples of 16 bytes. It cannot gather rows: those are addressed by pointers.


# -- properties of the GPU ---------------------------------------------------------------------------


@cache  # torch resolves the device again at each call, which takes as long as a part of the launch
def gpu_properties(device: torch.device) -> Any:
    """torch's: major, multi_processor_count, shared_memory_per_block_optin, ..."""
    return torch.cuda.get_device_properties(device)


ALIGNMENT = 16
"""Bytes."""


def describe(x: Tensor) -> TensorDescriptor | None:
    """The descriptor of a tensor with elements of 2 bytes whose last dimension is contiguous, with blocks that a launch
    sets to those of its tile; None where the tensor or the GPU has none."""
    if not (has_tma(x) and x.numel() and _is_aligned(x)):
        return None
    # A block shape that is valid for any tensor; set_blocks_of_... replaces it before the launch.
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1] * (x.dim() - 1) + [ALIGNMENT])


def has_tma(x: Tensor) -> bool:
    if is_interpreted():
        return True
    return x.element_size() == 2 and gpu_properties(x.device).major >= 9


def _is_aligned(x: Tensor) -> bool:
    # Bytes from one line, or matrix, to the next.
    lines = [stride * x.element_size() for stride in x.stride()[:-1]]
    return x.stride(-1) == 1 and not any(number % ALIGNMENT for number in (x.data_ptr(), *lines))


@dataclass(frozen=True)
class Tile:
    """The tile of a program, [rows, columns], in steps of `depth` along the reduction."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    """Pipelined steps, whose operands are in shared memory or being loaded."""

    def sizes(self) -> dict[str, int]:
        return {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth}

    def constants(self) -> dict[str, int]:
        """Arguments of a launch."""
        return {**self.sizes(), "num_warps": self.warps, "num_stages": self.stages}

    @property
    def shared_memory(self) -> int:
        """Bytes for operands in 16 bits, or for the result on its way to memory in fp32."""
        # Each stage holds a [rows, depth] and a [depth, columns] block of 2-byte elements.
        return max((self.rows + self.columns) * self.depth * 2 * self.stages, self.rows * self.columns * 4)

    def resident(self, shared_memory: int) -> int:
        """Programs at a time on a multiprocessor with so many bytes, two at most."""
        # CUDA takes 1 KiB for each program.
        return max(1, min(2, shared_memory // (self.shared_memory + 1024)))

    def gathering(self) -> Tile:
        """For a loop that gathers rows: Triton divides its stages between the loads of places and those of the rows
        that are there. With so many the rows have as many as in other loops."""
        return replace(self, stages=2 * self.stages - 1)

    def config(self, prepare: Callable[[dict[str, Any]], None]) -> triton.Config:
        """prepare: called with the arguments of a launch, before each."""
        return triton.Config(self.sizes(), num_warps=self.warps, num_stages=self.stages, pre_hook=prepare)


ANY_FORMAT = Tile(rows=64, columns=64, depth=32, warps=4, stages=3)
ROWS = (
    Tile(rows=128, columns=256, depth=64, warps=8, stages=3),
    Tile(rows=128, columns=256, depth=64, warps=8, stages=4),
    Tile(rows=128, columns=128, depth=64, warps=8, stages=4),
    Tile(rows=64, columns=256, depth=64, warps=8, stages=3),
    Tile(rows=64, columns=128, depth=64, warps=4, stages=4),
)
"""Tiles for rows in 16 bits. Large tiles read operands fewer times; small ones leave less of the last tile of an expert
empty. 64 rows are the fewest of a wgmma: with fewer, tensor cores would take another instruction, and a product is
bound by reading the matrices."""
OUTER = (
    Tile(rows=128, columns=256, depth=64, warps=8, stages=4),
    Tile(rows=128, columns=256, depth=32, warps=8, stages=6),
    Tile(rows=128, columns=128, depth=64, warps=8, stages=5),
    Tile(rows=128, columns=128, depth=32, warps=8, stages=4),
)
"""Tiles of an expert's weight gradient, [rows, columns] of its matrix, from rows in 16 bits. See `gathering`."""
READ_SHARED_MEMORY = (9, 10)
"""Major compute capabilities of GPUs whose tensor cores take operands from there. Elsewhere these are in registers, and
an accumulator with 256 columns leaves too few."""
WHOLE_DEPTH = max(tile.depth for tile in ROWS)
"""Multiples of this are multiples of every tile's depth."""


def is_timed(x: Tensor) -> bool:
    """Whether tiles are compared by their times. Deterministic runs take the first one that fits."""
    return x.element_size() == 2 and not is_interpreted() and not torch.are_deterministic_algorithms_enabled()


# Triton's own, which kernels can call too, take several microseconds.
def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(x: int) -> int:
    """That is at least x; 1 for 0."""
    return 1 << max(x - 1, 0).bit_length()


def mean_rows(rows: int, groups: int) -> int:
    """Size of a group, roughly, so that few shapes are timed: a power of two in 64 to 1024. Fewer rows are one tile of
    the smallest; of more, the last tile of a group hardly counts."""
    return min(max(next_power_of_2(ceil_div(rows, groups)), 64), 1024)


def not_mostly_empty(tiles: Sequence[Tile], mean: int) -> tuple[Tile, ...]:
    """Without those that have more rows than a group has."""
    return tuple(tile for tile in tiles if tile.rows <= mean)


def resident_programs(x: Tensor, sizes: Mapping[str, int]) -> int:
    """How many programs with the tile of these sizes run at a time on the GPU of x."""
    if is_interpreted():
        return 3
    gpu = gpu_properties(x.device)
    tile = next(tile for tile in (*ROWS, ANY_FORMAT) if tile.sizes().items() <= sizes.items())
    return gpu.multi_processor_count * tile.resident(gpu.shared_memory_per_multiprocessor)


def untimed_tile(tiles: tuple[Tile, ...], x: Tensor) -> Tile:
    """The tile for rows x where none is timed."""
    if x.element_size() > 2:
        return ANY_FORMAT
    if is_interpreted():
        return tiles[0]
    gpu = gpu_properties(x.device)
    return first_that_fits(tiles, gpu.major, gpu.shared_memory_per_block_optin)


def first_that_fits(tiles: tuple[Tile, ...], major: int, shared_memory: int) -> Tile:
    """major: of the GPU's compute capability. shared_memory: bytes that a program can have on it. The last tile is the
    smallest."""
    columns = 256 if major in READ_SHARED_MEMORY else 128
    fitting = (tile for tile in tiles if tile.columns <= columns and tile.shared_memory <= shared_memory)
    return next(fitting, tiles[-1])
