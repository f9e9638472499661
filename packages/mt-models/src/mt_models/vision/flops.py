"""Floating-point operations of an image tower for each image, from its configuration.

Counted as for decoders (mt_models.flops): matrix products only, backward twice forward.
"""

from __future__ import annotations

from dataclasses import dataclass

from mt_models.flops import Flops
from mt_models.vision.config import VisionConfig, VisionEncoderConfig


@dataclass(frozen=True)
class ImageFlops(Flops):
    """Forward FLOPs for each image."""

    patches: float
    """Patch embeddings."""
    attention_projections: float
    """Queries, keys, values and the output of attention, over all layers."""
    attention_core: float
    """Scores and their product with the values, over all layers."""
    feed_forward: float
    pooler: float
    """Attention pooling."""
    output: float
    """Classification logits."""


def tower_flops(config: VisionEncoderConfig, layers: int) -> ImageFlops:
    """The first `layers` layers, without the final norm and heads."""
    hidden, positions = config.hidden_size, config.num_positions
    return ImageFlops(
        patches=2 * config.num_patches * config.num_channels * config.patch_dim**2 * hidden,
        attention_projections=layers * positions * 8 * hidden**2,
        attention_core=layers * positions * 4 * positions * hidden,
        feed_forward=layers * positions * 4 * hidden * config.ffn_size,
        pooler=0.0,
        output=0.0,
    )


def flops_per_image(config: VisionConfig) -> ImageFlops:
    """Of a model of the family vision."""
    below = tower_flops(config, config.num_layers)
    return ImageFlops(
        patches=below.patches,
        attention_projections=below.attention_projections,
        attention_core=below.attention_core,
        feed_forward=below.feed_forward,
        pooler=pooler_flops(config),
        output=2.0 * config.hidden_size * (config.num_classes or 0),
    )


def pooler_flops(config: VisionConfig) -> float:
    """CLIP's pooler is a norm; SigLIP's has one query, and a feed-forward on one vector."""
    if config.has_class_token or not config.has_pooler:
        return 0.0
    hidden, positions = config.hidden_size, config.num_positions
    # Query and output of the one probe; keys and values of every position.
    projections = 2 * hidden**2 * (2 + 2 * positions)
    return projections + 4 * positions * hidden + 4 * hidden * config.ffn_size
