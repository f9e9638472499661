"""Floating-point operations of InternVL for each sample, from its configuration (counted as in mt_models.flops)."""

from __future__ import annotations

from mt_models.flops import Convention, flops_per_token
from mt_models.internvl.config import InternVLConfig
from mt_models.llava.flops import SampleFlops, sample_flops


def flops_per_sample(
    config: InternVLConfig,
    seq_length: int,
    *,
    images: int = 1,
    convention: Convention = "seen",
    feed_forward: float | None = None,
) -> SampleFlops:
    """seq_length: with the positions of images. images: views, which are tiles and whole images. convention,
    feed_forward: see mt_models.flops.flops_per_token."""
    hidden = config.decoder.hidden_size
    matrices = config.feature_width * hidden + hidden**2
    text = flops_per_token(config.decoder, seq_length, convention=convention, feed_forward=feed_forward)
    return sample_flops(config, text, config.vision_model.num_layers, matrices, images, seq_length)
