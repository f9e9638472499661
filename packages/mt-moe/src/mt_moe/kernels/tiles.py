"""The tiles of the grouped GEMM, of which the fastest is found when a shape is first multiplied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from mt_moe.kernels.availability import is_interpreted


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
"""Of rows in 16 bits. Large tiles read operands fewer times; small ones leave less of the last tile of an expert empty.
None splits the reduction: an element is one sum, in the same order whatever the tile."""
OUTER = (
    Tile(rows=128, columns=256, depth=64, warps=8, stages=4),
    Tile(rows=128, columns=256, depth=32, warps=8, stages=6),
    Tile(rows=128, columns=128, depth=64, warps=8, stages=5),
    Tile(rows=128, columns=128, depth=32, warps=4, stages=4),
)
"""Of an expert's weight gradient, from rows in 16 bits."""
WHOLE_DEPTH = max(tile.depth for tile in ROWS)
"""Multiples of this are multiples of every tile's depth."""


def is_timed(x: Tensor) -> bool:
    """Whether tiles are compared by their times. Deterministic runs take the first one that fits."""
    return x.element_size() == 2 and not is_interpreted() and not torch.are_deterministic_algorithms_enabled()


def resident_programs(x: Tensor, elements: int) -> int:
    """How many programs with an accumulator of so many elements run at a time on the GPU of x: one on each
    multiprocessor with the largest, two of the others."""
    if is_interpreted():
        return 3
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    # An fp32 accumulator of 128 x 256 takes half of a multiprocessor's registers.
    return processors * (1 if elements > 128 * 128 else 2)


def untimed_tile(tiles: tuple[Tile, ...], x: Tensor) -> Tile:
    """The tile for rows x where none is timed."""
    if x.element_size() > 2:
        return ANY_FORMAT
    if is_interpreted():
        return tiles[0]
    return first_that_fits(tiles, torch.cuda.get_device_properties(x.device).shared_memory_per_block_optin)


def first_that_fits(tiles: tuple[Tile, ...], shared_memory: int) -> Tile:
    """shared_memory: bytes that a program can have on its GPU. The last tile is the smallest."""
    return next((tile for tile in tiles if tile.shared_memory <= shared_memory), tiles[-1])
