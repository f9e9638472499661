"""The filters by which the sizes of images are changed, and their weights: Pillow's, to the last bit.

A filter is stretched over the pixels that become one (antialiasing). Time and memory are linear in the pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mt_data.datasets.images.config import Resample

Filter = Callable[[NDArray[np.float64]], NDArray[np.float64]]
BLOCK = 16
"""New rows that are computed by one product of matrices."""
UNIT = 2.0**-22
"""Pillow's weights are whole multiples of it. Sums of products of those and bytes are exact in float64."""


@dataclass(frozen=True)
class Taps:
    """The old pixels within the radius of each new one. first, end int64 [new]: they are old[first:end]. weights
    float64 [new, most taps]: how much of each, 0 behind the end; rows sum to 1."""

    first: NDArray[np.int64]
    end: NDArray[np.int64]
    weights: NDArray[np.float64]

    @classmethod
    def of(cls, old: int, new: int, within: range, resample: Resample) -> Taps:
        """Of the new pixels `within`, when `old` pixels become `new`."""
        radius, kernel = FILTERS[resample]
        scale = old / new
        stretch = max(scale, 1.0)
        # Where the centre of each new pixel lies among the old ones, [new].
        centres = (np.arange(within.start, within.stop) + 0.5) * scale
        # Pillow: xmin = (int)(center - support + 0.5), xmax = (int)(center + support + 0.5), cut to the image.
        first = np.maximum(np.trunc(centres - radius * stretch + 0.5), 0).astype(np.int64)
        end = np.minimum(np.trunc(centres + radius * stretch + 0.5), old).astype(np.int64)
        # [new, most taps]
        places = first[:, None] + np.arange((end - first).max())
        # A product with the reciprocal, as in Pillow: a division rounds differently in the last bit.
        distance = (places + 0.5 - centres[:, None]) * (1 / stretch)
        weights = np.where(places < end[:, None], kernel(distance), 0.0)
        weights /= weights.sum(1, keepdims=True)
        # Rounded half away from zero, as (int)(0.5 + w * (1 << PRECISION_BITS)) for positive weights in Pillow.
        return cls(first, end, np.trunc(weights / UNIT + np.copysign(0.5, weights)) * UNIT)

    @property
    def used(self) -> slice:
        """The old pixels that have a weight."""
        return slice(int(self.first[0]), int(self.end[-1]))

    def apply(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The rows `used` of an image [used, w, 3] -> its new rows [new, w, 3], rounded."""
        # [used, w * 3]: all columns and colours are resampled alike.
        rows = image.reshape(len(image), -1)
        found = np.empty((len(self.first), rows.shape[1]), np.uint8)
        for start in range(0, len(found), BLOCK):
            first, table = self._table(slice(start, start + BLOCK))
            # [block, taps] @ [taps, w * 3]; a block of neighbouring rows shares most of its taps.
            values = table @ rows[first : first + table.shape[1]].astype(np.float64)
            # clip, then the assignment to uint8 cuts off the fraction: together a rounding.
            values += 0.5
            found[start : start + BLOCK] = values.clip(0, 255, out=values)
        return found.reshape(-1, *image.shape[1:])

    def _table(self, block: slice) -> tuple[int, NDArray[np.float64]]:
        """The first of the rows `used` that a block of new ones takes, and the weights [block, rows from there on]."""
        first, end, weights = self.first[block], self.end[block], self.weights[block]
        table = np.zeros((len(first), int(end[-1] - first[0])))
        # Weights start at each row's own first tap; in the table all rows count from the block's first tap.
        places = first[:, None] - first[0] + np.arange(weights.shape[1])
        rows, taps = np.nonzero(places < (end - first[0])[:, None])
        table[rows, places[rows, taps]] = weights[rows, taps]
        return int(first[0] - self.first[0]), table


def cubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The cubic convolution filter with a = -0.5 (Keys, 1981)."""
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1
    far = -0.5 * (((x - 5) * x + 8) * x - 4)
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def lanczos(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The windowed sinc with three lobes on each side (Lanczos, 1956; Duchon, 1979)."""
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0)


FILTERS: dict[Resample, tuple[float, Filter]] = {"bicubic": (2.0, cubic), "lanczos": (3.0, lanczos)}
"""Radius in pixels, and the weight of a pixel at a distance."""
