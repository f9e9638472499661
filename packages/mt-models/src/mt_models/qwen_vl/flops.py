"""Floating-point operations of Qwen2.5-VL for each sample, from its configuration (counted as in mt_models.flops)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mt_models.flops import Convention, Flops, TokenFlops, flops_per_token
from mt_models.qwen_vl.config import QwenVisionConfig, QwenVLConfig
from mt_models.vision.flops import ImageFlops

Grid = tuple[int, int]
"""Rows and columns of merged patches of an image."""


@dataclass(frozen=True)
class SampleFlops(Flops):
    """Forward FLOPs for each sample."""

    vision_model: tuple[ImageFlops, ...]
    """Of each image."""
    vision_projection: float
    """Of all images."""
    language_model: TokenFlops
    """For each position, those of images included."""
    positions: int

    @property
    def forward(self) -> float:
        images = sum(image.forward for image in self.vision_model) + self.vision_projection
        return images + self.positions * self.language_model.forward


def flops_per_sample(
    config: QwenVLConfig, seq_length: int, grids: Sequence[Grid] = (), *, convention: Convention = "seen"
) -> SampleFlops:
    """seq_length: with the positions of images. grids: of the images. convention: see mt_models.flops."""
    vision, cells = config.vision_model, sum(rows * columns for rows, columns in grids)
    width = vision.hidden_size * vision.merged_patches
    return SampleFlops(
        vision_model=tuple(image_flops(vision, grid) for grid in grids),
        vision_projection=2.0 * cells * width * (width + config.decoder.hidden_size),
        language_model=flops_per_token(config.decoder, seq_length, convention=convention),
        positions=seq_length,
    )


def image_flops(config: QwenVisionConfig, grid: Grid) -> ImageFlops:
    """Scores count for the patches of the same window, in layers of full attention for all of the image. Patches
    are embedded once, not once a frame."""
    hidden, merged = config.hidden_size, config.merged_patches
    patches = grid[0] * grid[1] * merged
    full = len(set(config.full_attention_layers))
    # Pairs of patches: of the whole image in layers of full attention; elsewhere m^2 x m^2 for each pair of cells.
    scores = full * patches**2 + (config.num_layers - full) * merged**2 * _pairs_in_windows(grid, config.window_side)
    return ImageFlops(
        patches=2 * patches * config.num_channels * config.patch_dim**2 * hidden,
        attention_projections=config.num_layers * patches * 8 * hidden**2,
        attention_core=4 * scores * hidden,
        feed_forward=config.num_layers * patches * 6 * hidden * config.ffn_size,
        pooler=0.0,
        output=0.0,
    )


def _pairs_in_windows(grid: Grid, side: int) -> int:
    """Pairs of merged patches that are in one window."""

    def squares(length: int) -> int:
        # Windows are products of a range of rows and one of columns, so that pairs in them are a product
        # too; the last window of each direction has what is left over.
        return length // side * side**2 + (length % side) ** 2

    return squares(grid[0]) * squares(grid[1])
