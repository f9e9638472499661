"""Floating-point operations of LLaVA, SmolVLM and InternVL for each sample, from their configuration (counted as in
mt_models.flops)."""

from __future__ import annotations

from dataclasses import dataclass

from mt_models.flops import Convention, Flops, TokenFlops, flops_per_token
from mt_models.llava.config import VisionLanguageConfig
from mt_models.vision.flops import ImageFlops, tower_flops


@dataclass(frozen=True)
class SampleFlops(Flops):
    """Forward FLOPs for each sample."""

    vision_model: ImageFlops
    """For each image, up to the last state that the projection reads."""
    vision_projection: float
    """For each image."""
    language_model: TokenFlops
    """For each position, those of images included."""
    images: int
    positions: int

    @property
    def forward(self) -> float:
        per_image = self.vision_model.forward + self.vision_projection
        return self.images * per_image + self.positions * self.language_model.forward


def flops_per_sample(
    config: VisionLanguageConfig,
    seq_length: int,
    *,
    images: int = 1,
    convention: Convention = "seen",
    feed_forward: float | None = None,
) -> SampleFlops:
    """seq_length: with the positions of images. images: views, which are tiles and whole images. convention,
    feed_forward: see mt_models.flops.flops_per_token."""
    return SampleFlops(
        vision_model=tower_flops(config.vision_model, config.tower_layers),
        # Each weight is used once for a feature.
        vision_projection=2.0 * config.image_seq_length * config.projection_weights,
        language_model=flops_per_token(config.decoder, seq_length, convention=convention, feed_forward=feed_forward),
        images=images,
        positions=seq_length,
    )
