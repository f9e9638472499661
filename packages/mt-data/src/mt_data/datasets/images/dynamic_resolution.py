"""Images in their own proportions: whole cells of img_h by img_w pixels, as many as an image's pixels fill.

As the processor of Qwen2-VL does it (Wang et al., *Qwen2-VL*, 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mt_data.datasets.images.config import ImageTextKeys, Resample
from mt_data.datasets.images.tiles import Grid, Tiling


@dataclass(frozen=True)
class DynamicResolution(Tiling):
    """Each view is a cell. min_pixels, max_pixels: of an image after it is resized."""

    min_pixels: int = 1
    max_pixels: int = 1

    @classmethod
    def of(cls, config: ImageTextKeys, resample: Resample = "bicubic") -> DynamicResolution:
        return cls(
            config.img_h,
            config.img_w,
            resize="squash",
            resample=resample,
            min_pixels=config.min_pixels,
            max_pixels=config.max_pixels,
        )

    @property
    def max_views(self) -> int:
        return self.max_pixels // (self.img_h * self.img_w)

    @property
    def min_views(self) -> int:
        """Of one image. Where an image is made smaller, both sides are rounded down to whole cells, which leaves more
        than a quarter of max_pixels, but can be fewer than min_pixels."""
        cell = self.img_h * self.img_w
        return max(min(-(-self.min_pixels // cell), self.max_pixels // (4 * cell) + 1), 1)

    def grid(self, height: int, width: int) -> Grid:
        """The rows and columns of cells nearest to the image's size; where they have too many or too few pixels, of
        the image made smaller or larger. Where the reference exceeds max_pixels (a side has at least one cell),
        the longer side is squashed into them."""
        # transformers: smart_resize of Qwen2-VL, with cells in place of its factor of 28 pixels.
        rows, columns = round(height / self.img_h), round(width / self.img_w)
        pixels = rows * self.img_h * columns * self.img_w
        if pixels > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            rows, columns = math.floor(height / scale / self.img_h), math.floor(width / scale / self.img_w)
        elif pixels < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * scale / self.img_h), math.ceil(width * scale / self.img_w)
        return self._within_max_pixels(max(rows, 1), max(columns, 1))

    def _within_max_pixels(self, rows: int, columns: int) -> Grid:
        if rows * columns <= self.max_views:
            return Grid(rows, columns)
        # The side that stays; the longer one becomes as long as max_views allows.
        shorter = min(rows, columns, math.isqrt(self.max_views))
        # The division rounds down, which can fall below min_pixels; shorter = 1 uses all of the max_views cells.
        while shorter * (self.max_views // shorter) * self.img_h * self.img_w < self.min_pixels:
            shorter -= 1
        longer = self.max_views // shorter
        return Grid(longer, shorter) if rows > columns else Grid(shorter, longer)


def padded_grids(grids: list[Grid], most: int) -> NDArray[np.int64]:
    """[most, 2]: rows and columns, the rest is 0."""
    found = np.zeros((most, 2), np.int64)
    found[: len(grids)] = np.array(grids, np.int64).reshape(-1, 2)
    return found
