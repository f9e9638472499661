"""Floating-point operations of SmolVLM for each sample, from its configuration (counted as in mt_models.flops)."""

from __future__ import annotations

from mt_models.flops import Convention, flops_per_token
from mt_models.llava.flops import SampleFlops, sample_flops
from mt_models.smolvlm.config import SmolVLMConfig


def flops_per_sample(
    config: SmolVLMConfig,
    seq_length: int,
    *,
    images: int = 1,
    convention: Convention = "seen",
    feed_forward: float | None = None,
) -> SampleFlops:
    """seq_length: with the positions of images. images: views, which are tiles and whole images. convention,
    feed_forward: see mt_models.flops.flops_per_token."""
    tower, decoder = config.vision_model, config.decoder
    matrix = tower.hidden_size * config.scale_factor**2 * decoder.hidden_size
    text = flops_per_token(decoder, seq_length, convention=convention, feed_forward=feed_forward)
    return sample_flops(config, text, tower.num_layers, matrix, images, seq_length)
