"""The tokens of an image in a text: a place for each feature of each of its views, and markers around them.

Markers are those of the processors of the published models. They are encoded by the tokenizer; where it has a token for
a marker, that is what comes out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_data.datasets.images.config import ImageMarkers
from mt_data.datasets.images.tiles import Grid, Tiling
from mt_data.datasets.text_files import Encode

IMAGE = -1
"""Stands for a feature, and in a text that is not expanded for an image."""
VIEW = "\0"
"""Stands for the features of a view in the text of an image."""


def no_markers(grid: Grid, views: int) -> str:
    return VIEW * views


def internvl_markers(grid: Grid, views: int) -> str:
    """InternVL's: one pair around all views."""
    return f"<img>{VIEW * views}</img>"


def idefics3_markers(grid: Grid, views: int) -> str:
    """Those of Idefics3 and SmolVLM: row and column before a tile, and the whole image last."""
    around = "<fake_token_around_image>"
    whole = f"{around}<global-img>{VIEW}{around}"
    if views == 1:
        return whole
    # transformers: Idefics3Processor. Rows are separated by a line end, and the whole image by an empty line.
    rows = (
        "".join(f"{around}<row_{row}_col_{column}>{VIEW}" for column in range(1, grid.columns + 1))
        for row in range(1, grid.rows + 1)
    )
    return "\n".join([*rows, f"\n{whole}"])


def qwen2_vl_markers(grid: Grid, views: int) -> str:
    """Those of Qwen2-VL: one pair around all cells of an image."""
    return f"<|vision_start|>{VIEW * views}<|vision_end|>"


MARKERS: dict[ImageMarkers, Callable[[Grid, int], str]] = {
    "none": no_markers,
    "idefics3": idefics3_markers,
    "internvl": internvl_markers,
    "qwen2_vl": qwen2_vl_markers,
}
IN_TEMPLATES: dict[ImageMarkers, str] = {"qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>"}
"""What the chat templates of the published models write for an image, where that is not "<image>"."""


class ImageTokens:
    """The tokens of images by their grids. features: of a view. encode: of a text within another one."""

    def __init__(self, tiling: Tiling, features: int, markers: ImageMarkers, encode: Encode) -> None:
        self.tiling, self.features = tiling, features
        self.markers, self.encode = MARKERS[markers], encode
        self.in_templates = IN_TEMPLATES.get(markers)
        # Per object: a cache on the method would keep every object alive.
        self.of = lru_cache(maxsize=256)(self._of)

    def _of(self, grid: Grid) -> NDArray[np.int32]:
        """[n], IMAGE once for each feature of each view."""
        text = self.markers(grid, self.tiling.num_views(grid))
        # The group keeps the separators in the result.
        pieces = re.split(f"({VIEW})", text)
        parts = [[IMAGE] * self.features if piece == VIEW else self.encode(piece) for piece in pieces if piece]
        return np.concatenate([np.array(part, np.int32) for part in parts])

    def expand(
        self, tokens: NDArray[np.int32], counted: NDArray[np.bool_], grids: Sequence[Grid]
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """A text [n] with IMAGE once for each image -> with the tokens of each, which do not count."""
        places = np.flatnonzero(tokens == IMAGE)
        images = [self.of(grid) for grid in grids]
        uncounted = [np.zeros(len(image), np.bool_) for image in images]
        return replaced(tokens, places, images), replaced(counted, places, uncounted)


def replaced(values: NDArray[Any], places: NDArray[np.int64], parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """values [n] with a part in place of each of the elements at `places`."""
    # np.split cuts before each place, so that each further part begins with the element that is replaced: after[1:].
    first, *rest = np.split(values, places)
    return np.concatenate([first, *(one for part, after in zip(parts, rest, strict=True) for one in (part, after[1:]))])
