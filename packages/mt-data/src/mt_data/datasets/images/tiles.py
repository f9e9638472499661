"""One image as several views of the model's size: tiles of a grid near its proportions, and the whole.

The grid is chosen as InternVL and Megatron's examples do (Chen et al., *How Far Are We to GPT-4V?*, 2024), or by the
longer side of the image, as Idefics3 does (Laurençon et al., 2024).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mt_data.datasets.images.config import ImageTextKeys, Resample, Resize, SizeRule, VideoRule
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
    resample: Resample = "bicubic"

    @property
    def max_views(self) -> int:
        """Most views of one image."""
        return self.num_views(Grid(1, self.max_num_tiles))

    @property
    def min_views(self) -> int:
        """Fewest views of one image."""
        return 1

    def grid(self, height: int, width: int) -> Grid:
        """The grid with the proportions nearest to the image's; of equally near ones the larger, if the image has more
        than half of its pixels."""
        best, nearest = Grid(1, 1), float("inf")
        for grid in grids(self.max_num_tiles):
            pixels = grid.tiles * self.img_h * self.img_w
            # InternVL: find_closest_aspect_ratio, with tiles that need not be square.
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
            return fit(image, self.img_h, self.img_w, self.resize, self.resample)[None]
        tiles = self.cut(resize(image, grid.rows * self.img_h, grid.columns * self.img_w, self.resample), grid)
        if not self.use_thumbnail:
            return tiles
        return np.concatenate([tiles, resize(image, self.img_h, self.img_w, self.resample)[None]])

    def cut(self, image: NDArray[np.uint8], grid: Grid) -> NDArray[np.uint8]:
        """An image as large as the grid -> [tiles, img_h, img_w, 3], row by row."""
        # [rows, img_h, columns, img_w, 3] -> [rows, columns, img_h, img_w, 3] -> [tiles, img_h, img_w, 3]
        tiles = image.reshape(grid.rows, self.img_h, grid.columns, self.img_w, 3)
        return tiles.transpose(0, 2, 1, 3, 4).reshape(-1, self.img_h, self.img_w, 3)


@dataclass(frozen=True)
class LongestEdgeTiling(Tiling):
    """The longer side becomes longest_edge pixels, larger or smaller; then both sides are stretched to whole tiles."""

    longest_edge: int = 0
    use_thumbnail: bool = True

    @property
    def max_views(self) -> int:
        # A longer shorter side never gives fewer tiles, so these are the largest of each kind, [height, width]: of a
        # square image (its height is rounded up to an even number), of wider ones, of higher ones. They differ, since
        # one side is stretched to whole tiles before the other one follows.
        edge = self.longest_edge
        sizes = (even(edge), edge), (even(edge - 1), edge), (edge, even(edge - 2))
        return max(self.num_views(self._grid_of_resized(*size)) for size in sizes)

    def grid(self, height: int, width: int) -> Grid:
        return self._grid_of_resized(*self.resized(height, width))

    def _grid_of_resized(self, height: int, width: int) -> Grid:
        proportion = width / height
        if width >= height:
            # transformers: Idefics3ImageProcessor.resize_for_vision_encoder. The longer side is rounded up to whole
            # tiles, the shorter one follows the proportions and is rounded up then; int() cuts as there.
            columns = math.ceil(width / self.img_w)
            return Grid(math.ceil(int(columns * self.img_w / proportion) / self.img_h), columns)
        rows = math.ceil(height / self.img_h)
        return Grid(rows, math.ceil(int(rows * self.img_h * proportion) / self.img_w))

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in the same proportions, before they are stretched."""
        proportion = width / height
        if width >= height:
            # transformers: _resize_output_size_rescale_to_max_len of Idefics3.
            return even(int(self.longest_edge / proportion)), self.longest_edge
        return self.longest_edge, even(int(self.longest_edge * proportion))

    def views(self, image: NDArray[np.uint8], grid: Grid) -> NDArray[np.uint8]:
        """Tiles row by row, then the whole. Each step rounds to whole values, as the reference's images do."""
        image = resize(image, *self.resized(*image.shape[:2]), self.resample)
        image = resize(image, grid.rows * self.img_h, grid.columns * self.img_w, self.resample)
        if grid.tiles == 1:
            return image[None]
        return np.concatenate([self.cut(image, grid), resize(image, self.img_h, self.img_w, self.resample)[None]])


def even(length: int) -> int:
    """The next even number, at least 1 as in the reference."""
    return max(length + length % 2, 1)


@lru_cache(maxsize=16)
def grids(max_num_tiles: int) -> list[Grid]:
    """All of at most so many tiles, small ones first."""
    candidates = [
        Grid(rows, columns)
        for columns in range(1, max_num_tiles + 1)
        for rows in range(1, max_num_tiles // columns + 1)
    ]
    return sorted(candidates, key=lambda grid: (grid.tiles, grid.columns))


# -- dynamic resolution: cells of img_h by img_w pixels, as many as the image's pixels fill ----------
#
# As the processors of Qwen2-VL (Wang et al., *Qwen2-VL*, 2024), Gemma 4 and Pixtral (Agrawal et al., *Pixtral 12B*,
# 2024) do it.


@dataclass(frozen=True)
class DynamicResolution(Tiling):
    """Each view is a cell. min_pixels, max_pixels: of an image after it is resized."""

    min_pixels: int = 1
    max_pixels: int = 1
    min_video_pixels: int = 1
    max_video_pixels: int = 1
    has_videos: bool = False
    video_rule: VideoRule = "qwen3_vl"

    @staticmethod
    def of(config: ImageTextKeys, resample: Resample = "bicubic") -> DynamicResolution:
        """By the rule of the configuration."""
        return RULES[config.size_rule](
            config.img_h,
            config.img_w,
            resize="squash",
            resample=resample,
            min_pixels=config.min_pixels,
            max_pixels=config.max_pixels,
            min_video_pixels=config.min_video_pixels,
            max_video_pixels=config.max_video_pixels,
            has_videos=config.frames_per_view > 1,
            video_rule=config.video_rule,
        )

    @property
    def max_views(self) -> int:
        return self.max_pixels // (self.img_h * self.img_w)

    @property
    def min_views(self) -> int:
        """Fewest views of one image. Where an image is made smaller, both sides are rounded down to whole cells, which
        leaves more than a quarter of max_pixels, but can be fewer than min_pixels."""
        cell = self.img_h * self.img_w
        if self.has_videos:
            return 1
        return max(min(-(-self.min_pixels // cell), self.max_pixels // (4 * cell) + 1), 1)

    def grid(self, height: int, width: int) -> Grid:
        """The rows and columns of cells nearest to the image's size; where they have too many or too few pixels, of
        the image made smaller or larger. Where the reference exceeds max_pixels (a side has at least one cell),
        the longer side is squashed into them."""
        return self._within_max_pixels(*self._nearest(height, width, self.min_pixels, self.max_pixels))

    def _nearest(self, height: int, width: int, fewest: int, most: int) -> Grid:
        """By numbers of pixels."""
        # transformers: smart_resize of Qwen2-VL, with cells in place of its factor of 28 pixels.
        rows, columns = round(height / self.img_h), round(width / self.img_w)
        pixels = rows * self.img_h * columns * self.img_w
        if pixels > most:
            scale = math.sqrt(height * width / most)
            rows, columns = math.floor(height / scale / self.img_h), math.floor(width / scale / self.img_w)
        elif pixels < fewest:
            scale = math.sqrt(fewest / (height * width))
            rows, columns = math.ceil(height * scale / self.img_h), math.ceil(width * scale / self.img_w)
        return Grid(max(rows, 1), max(columns, 1))

    @property
    def of_videos(self) -> DynamicResolution:
        """By which the frames of videos are cut, once their grid is known."""
        return self

    def video_grid(self, frames: int, height: int, width: int) -> Grid:
        """That of each frame of a video of which so many are taken: by the pixels of all of them together (qwen3_vl),
        or by those of one."""
        if self.video_rule != "qwen3_vl":
            return self._nearest(height, width, self.min_video_pixels, self.max_video_pixels)
        # transformers: smart_resize of Qwen3-VL's video processor, which compares with an even number of frames.
        if height < self.img_h or width < self.img_w:
            scale = max(self.img_h / height, self.img_w / width)
            height, width = int(height * scale), int(width * scale)
        rows, columns = round(height / self.img_h), round(width / self.img_w)
        pixels = round(frames / 2) * 2 * rows * self.img_h * columns * self.img_w
        if pixels > self.max_video_pixels:
            scale = math.sqrt(frames * height * width / self.max_video_pixels)
            rows, columns = math.floor(height / scale / self.img_h), math.floor(width / scale / self.img_w)
        elif pixels < self.min_video_pixels:
            scale = math.sqrt(self.min_video_pixels / (frames * height * width))
            rows, columns = math.ceil(height * scale / self.img_h), math.ceil(width * scale / self.img_w)
        return Grid(max(rows, 1), max(columns, 1))

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


@dataclass(frozen=True)
class FilledResolution(DynamicResolution):
    """The largest size in the image's proportions that max_pixels hold, both sides rounded down to whole cells."""

    @property
    def min_views(self) -> int:
        # Sides of r and c cells with r c = max_views lose less than one each: more than a quarter is left.
        return max(self.max_views // 4, 1)

    def grid(self, height: int, width: int) -> Grid:
        # transformers: get_aspect_ratio_preserving_size of Gemma 4, with cells in place of its multiple.
        factor = math.sqrt(self.max_pixels / (height * width))
        rows, columns = math.floor(factor * height / self.img_h), math.floor(factor * width / self.img_w)
        # A side without a whole cell gets one, and the other as many as its proportion or the pixels allow.
        if not rows:
            return Grid(1, min(max(width // height, 1), self.max_views))
        if not columns:
            return Grid(min(max(height // width, 1), self.max_views), 1)
        return Grid(rows, columns)


@dataclass(frozen=True)
class LongestEdgeResolution(DynamicResolution):
    """The cells that hold an image; one with a side longer than the root of max_pixels is made smaller before."""

    @property
    def longest_edge(self) -> int:
        return math.isqrt(self.max_pixels)

    @property
    def max_views(self) -> int:
        return -(-self.longest_edge // self.img_h) * -(-self.longest_edge // self.img_w)

    @property
    def min_views(self) -> int:
        return 1

    def grid(self, height: int, width: int) -> Grid:
        # transformers: get_resize_output_image_size of Pixtral.
        ratio = max(height / self.longest_edge, width / self.longest_edge)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        return Grid((height - 1) // self.img_h + 1, (width - 1) // self.img_w + 1)


@dataclass(frozen=True)
class PaddedResolution(DynamicResolution):
    """The cells that hold an image, which is black beyond its ends; one with more than max_pixels, or a side of more
    than 256 cells, is made smaller before. It is never made larger."""

    LONGEST: ClassVar[int] = 256
    """Cells of a side at most."""
    PATCHES: ClassVar[int] = 2
    """Patches of the side of a cell: what max_pixels hold is counted in whole patches."""

    @property
    def max_views(self) -> int:
        most, side = self.max_pixels * self.PATCHES**2 // (self.img_h * self.img_w), self.LONGEST * self.PATCHES
        # A side of r cells has more than 2 (r - 1) patches. Whole patches are counted, so that each side can have one
        # more than the product allows: a b <= most for sides below a + 1 and b + 1.
        widths = [min(side, most / max(2 * rows - 3, 1) + 1) for rows in range(1, self.LONGEST + 1)]
        return max(rows * math.ceil(width / self.PATCHES) for rows, width in enumerate(widths, 1))

    @property
    def min_views(self) -> int:
        return 1

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in pixels before they are padded."""
        # transformers: navit_resize of Kimi K2.5.
        side_h, side_w = self.img_h // self.PATCHES, self.img_w // self.PATCHES
        patches = max(1, height // side_h) * max(1, width // side_w)
        most = self.max_pixels // (side_h * side_w)
        longest = self.LONGEST * self.img_h, self.LONGEST * self.img_w
        scale = min(1.0, math.sqrt(most / patches), longest[0] / height, longest[1] / width)
        return min(max(1, int(height * scale)), longest[0]), min(max(1, int(width * scale)), longest[1])

    @property
    def of_videos(self) -> DynamicResolution:
        return replace(self, max_pixels=self.max_video_pixels)

    def video_grid(self, frames: int, height: int, width: int) -> Grid:
        return self.of_videos.grid(height, width)

    def grid(self, height: int, width: int) -> Grid:
        height, width = self.resized(height, width)
        return Grid(-(-height // self.img_h), -(-width // self.img_w))

    def views(self, image: NDArray[np.uint8], grid: Grid) -> NDArray[np.uint8]:
        image = resize(image, *self.resized(*image.shape[:2]), self.resample)
        padded = np.zeros((grid.rows * self.img_h, grid.columns * self.img_w, 3), np.uint8)
        padded[: image.shape[0], : image.shape[1]] = image
        return self.cut(padded, grid)


RULES: dict[SizeRule, type[DynamicResolution]] = {
    "nearest": DynamicResolution,
    "fill": FilledResolution,
    "longest_edge": LongestEdgeResolution,
    "padded": PaddedResolution,
}


def padded_grids(grids: list[Grid], most: int, times: Sequence[int] | None = None) -> NDArray[np.int64]:
    """[most, 2]: rows and columns, the rest is 0; with the times of views [most, 3]."""
    padded = np.zeros((most, 2 if times is None else 3), np.int64)
    padded[: len(grids), :2] = np.array(grids, np.int64).reshape(-1, 2)
    if times is not None:
        padded[: len(grids), 2] = times
    return padded
