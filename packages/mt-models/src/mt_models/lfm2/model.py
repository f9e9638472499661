"""LFM2: layers with a gated short convolution or with attention, each with a feed-forward."""

from __future__ import annotations

from mt_core.nn.build_context import ModelBuildContext
from mt_models.blocks.decoder import RotaryDecoder, rotary_layer
from mt_models.blocks.short_conv import ShortConvLayer
from mt_models.blocks.transformer import TransformerLayer
from mt_models.lfm2.config import Lfm2Config


def lfm2_layer(config: Lfm2Config, context: ModelBuildContext, number: int) -> TransformerLayer:
    if not config.conv_layers[number]:
        return rotary_layer(config, context, number)
    feed_forward = context.feed_forward(config.feed_forward, config, number)
    return ShortConvLayer(config, feed_forward, context.parallel)


def build_lfm2(config: Lfm2Config, context: ModelBuildContext) -> RotaryDecoder:
    return RotaryDecoder(config, context, lambda number: lfm2_layer(config, context, number))
