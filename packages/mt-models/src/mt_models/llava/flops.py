"""Floating-point operations of LLaVA for each sample, from its configuration (counted as in mt_models.flops).

`sample_flops` is what other families of images and text have in common with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from mt_models.flops import Convention, Flops, TokenFlops, flops_per_token
from mt_models.llava.config import LlavaConfig, VisionLanguageConfig
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
    config: LlavaConfig,
    seq_length: int,
    *,
    images: int = 1,
    convention: Convention = "seen",
    feed_forward: float | None = None,
) -> SampleFlops:
    """seq_length: with the positions of images. convention, feed_forward: see mt_models.flops.flops_per_token."""
    hidden = config.decoder.hidden_size
    matrices = config.feature_width * hidden + (hidden**2 if config.vision_projection_type == "mlp" else 0)
    decoder = flops_per_token(config.decoder, seq_length, convention=convention, feed_forward=feed_forward)
    return sample_flops(config, decoder, max(config.feature_states), matrices, images, seq_length)


def sample_flops(
    config: VisionLanguageConfig, decoder: TokenFlops, layers: int, matrices: int, images: int, positions: int
) -> SampleFlops:
    """layers: of the tower. matrices: weights of the projection, each of which is used once for a feature."""
    return SampleFlops(
        vision_model=tower_flops(config.vision_model, layers),
        vision_projection=2.0 * config.image_seq_length * matrices,
        language_model=decoder,
        images=images,
        positions=positions,
    )
