"""Jamba: layers with a Mamba-1 mixer or with attention, each with a feed-forward or experts."""

from __future__ import annotations

from mt_core.nn.build_context import ModelBuildContext
from mt_models.blocks.decoder import RotaryDecoder, rotary_layer
from mt_models.blocks.mamba1_mixer import Mamba1Layer
from mt_models.blocks.transformer import TransformerLayer
from mt_models.jamba.config import JambaConfig


def jamba_layer(config: JambaConfig, context: ModelBuildContext, number: int) -> TransformerLayer:
    if config.attention_layers[number]:
        return rotary_layer(config, context, number)
    feed_forward = context.feed_forward(config.feed_forward, config, number)
    return Mamba1Layer(config, feed_forward, context.parallel)


def build_jamba(config: JambaConfig, context: ModelBuildContext) -> RotaryDecoder:
    """See `ModelSpec.build`."""
    return RotaryDecoder(config, context, lambda number: jamba_layer(config, context, number))
