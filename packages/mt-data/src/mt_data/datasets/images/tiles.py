"""One image as several views of the model's size: tiles of a grid near its proportions, and the whole.

The grid is chosen as InternVL and Megatron's examples do (Chen et al., *How Far Are We to GPT-4V?*, 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mt_data.datasets.images.config import Resize
from mt_data.datasets.images.pixels import fit, resize


class Grid(NamedTuple):
    rows: int
    columns: int

    @property
    def tiles(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class Tiling:
    """How images become views of img_h by img_w pixels. max_num_tiles: without the thumbnail."""

    img_h: int
    img_w: int
    max_num_tiles: int = 1
    use_thumbnail: bool = False
    resize: Resize = "crop"

    def grid(self, height: int, width: int) -> Grid:
        """The grid with the proportions nearest to the image's; of equally near ones the larger, if the image has more
        than half of its pixels."""
        best, nearest = Grid(1, 1), float("inf")
        for grid in grids(self.max_num_tiles):
            pixels = grid.tiles * self.img_h * self.img_w
            distance = abs(width / height - (grid.columns * self.img_w) / (grid.rows * self.img_h))
            if distance < nearest or (distance == nearest and height * width > 0.5 * pixels):
                best, nearest = grid, distance
        return best

    def num_views(self, grid: Grid) -> int:
        return grid.tiles + (self.use_thumbnail and grid.tiles > 1)

    def views(self, image: NDArray[np.uint8], grid: Grid) -> NDArray[np.uint8]:
        """uint8 [height, width, 3] -> uint8 [num_views, img_h, img_w, 3]: tiles row by row, then the thumbnail.

        An image that is not cut is resized as `resize` says; one that is cut is squashed to the grid.
        """
        if grid.tiles == 1:
            return fit(image, self.img_h, self.img_w, self.resize)[None]
        whole = resize(image, grid.rows * self.img_h, grid.columns * self.img_w)
        cut = whole.reshape(grid.rows, self.img_h, grid.columns, self.img_w, 3)
        tiles = cut.transpose(0, 2, 1, 3, 4).reshape(-1, self.img_h, self.img_w, 3)
        if not self.use_thumbnail:
            return tiles
        return np.concatenate([tiles, resize(image, self.img_h, self.img_w)[None]])


@lru_cache(maxsize=16)
def grids(max_num_tiles: int) -> list[Grid]:
    """All of at most so many tiles, small ones first."""
    found = [
        Grid(rows, columns)
        for columns in range(1, max_num_tiles + 1)
        for rows in range(1, max_num_tiles // columns + 1)
    ]
    return sorted(found, key=lambda grid: (grid.tiles, grid.columns))
