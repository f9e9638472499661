"""Images in their own proportions: whole cells of img_h by img_w pixels, as many as an image's pixels fill.

As the processor of Qwen2-VL does it (Wang et al., *Qwen2-VL*, 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_data.datasets.images.config import ImageTextKeys, Resample
from mt_data.datasets.images.tiles import Grid, Tiling

MAX_PROPORTION = 200


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

    def grid(self, height: int, width: int) -> Grid:
        """The rows and columns of cells nearest to the image's size; where they have too many or too few pixels, of
        the image made smaller or larger. Raises DataError for a side that is more than 200 times the other."""
        if max(height, width) > MAX_PROPORTION * min(height, width):
            raise DataError(
                f"an image of {height} x {width} pixels is more than {MAX_PROPORTION} times as long as it is wide"
            )
        rows, columns = round(height / self.img_h), round(width / self.img_w)
        pixels = rows * self.img_h * columns * self.img_w
        if pixels > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            rows, columns = math.floor(height / scale / self.img_h), math.floor(width / scale / self.img_w)
        elif pixels < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * scale / self.img_h), math.ceil(width * scale / self.img_w)
        return Grid(max(rows, 1), max(columns, 1))


def padded_grids(grids: list[Grid], most: int) -> NDArray[np.int64]:
    """[most, 2]: rows and columns, the rest is 0."""
    found = np.zeros((most, 2), np.int64)
    found[: len(grids)] = np.array(grids, np.int64).reshape(-1, 2)
    return found
