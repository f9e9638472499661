"""Synthetic images: one coloured shape on a noisy background. The same everywhere, and as many as one likes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mt_core.specs import Split
from mt_data.datasets.splits import SPLITS

Distances = NDArray[np.float64]

KINDS: dict[str, Callable[[Distances, Distances], NDArray[np.bool_]]] = {
    "circle": lambda y, x: np.hypot(y, x) <= 1,
    "square": lambda y, x: np.maximum(np.abs(y), np.abs(x)) <= 0.8,
    "triangle": lambda y, x: (np.abs(x) <= (y + 1) / 2) & (y <= 0.8),
    "cross": lambda y, x: (np.minimum(np.abs(y), np.abs(x)) <= 0.3) & (np.maximum(np.abs(y), np.abs(x)) <= 1),
    "ring": lambda y, x: (np.hypot(y, x) <= 1) & (np.hypot(y, x) >= 0.55),
    "bar": lambda y, x: (np.abs(y) <= 0.3) & (np.abs(x) <= 1),
}
"""Which points belong to a shape of radius 1 around (0, 0); y points down."""
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (235, 215, 40),
    "purple": (160, 50, 190),
    "white": (245, 245, 245),
}
PLACES = ("top left", "top right", "bottom left", "bottom right")
EPOCH = 10_000
"""Samples when no number is requested."""
NOISE = 40
BRIGHTEST_BACKGROUND = 90


@dataclass(frozen=True)
class Picture:
    """pixels: uint8 [height, width, 3]. The rest is what it shows, by name."""

    pixels: NDArray[np.uint8]
    kind: str
    colour: str
    place: str

    @property
    def caption(self) -> str:
        return f"a {self.colour} {self.kind} at the {self.place}"


def draw(height: int, width: int, *, seed: int, split: Split, index: int) -> Picture:
    """Picture number `index` of a split. RandomState's streams never change between versions of NumPy."""
    random = np.random.RandomState([seed % 2**32, SPLITS.index(split), index])
    kind = list(KINDS)[random.randint(len(KINDS))]
    colour = list(COLOURS)[random.randint(len(COLOURS))]
    place = random.randint(len(PLACES))
    radius = min(height, width) * random.uniform(0.16, 0.24)
    # The middle of a quarter, moved a little.
    middle_y = height * (0.25 + 0.5 * (place // 2) + random.uniform(-0.04, 0.04))
    middle_x = width * (0.25 + 0.5 * (place % 2) + random.uniform(-0.04, 0.04))
    # [height, 1] and [1, width]: distances from the middle in units of the radius, to the centres of the pixels.
    y = (np.arange(height) + 0.5 - middle_y)[:, None] / radius
    x = (np.arange(width) + 0.5 - middle_x)[None, :] / radius
    background = random.randint(0, BRIGHTEST_BACKGROUND)
    inside = KINDS[kind](*np.broadcast_arrays(y, x))
    plain = np.where(inside[..., None], COLOURS[colour], background)
    noisy = plain + random.randint(-NOISE, NOISE + 1, size=(height, width, 3))
    return Picture(noisy.clip(0, 255).astype(np.uint8), kind, colour, PLACES[place])
