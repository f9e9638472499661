"""Kimi Linear: pre-norm layers of Kimi delta attention or of latent attention without positions, and MoE."""

from __future__ import annotations

from torch import nn

from mt_core.nn.build_context import ModelBuildContext
from mt_models.blocks.decoder import RotaryDecoder, attention_core
from mt_models.blocks.kimi_delta_net import KimiDeltaNet
from mt_models.blocks.latent_attention import UnrotatedLatentAttention
from mt_models.blocks.transformer import TransformerLayer
from mt_models.kimi_linear.config import KimiLinearConfig


def kimi_layer(config: KimiLinearConfig, context: ModelBuildContext, number: int, *, linear: bool) -> TransformerLayer:
    ctx, core = context.parallel, attention_core(config, context)
    attention: nn.Module
    if linear:
        attention = KimiDeltaNet(config, ctx)
    else:
        remakes = context.recompute.selects("mla_up_proj")
        attention = UnrotatedLatentAttention(config, core, ctx, remakes_heads=remakes)
    feed_forward = context.feed_forward(config.feed_forward, config, number)
    return TransformerLayer(config, core, feed_forward, ctx, attention)


def build_kimi_linear(config: KimiLinearConfig, context: ModelBuildContext) -> RotaryDecoder:
    """See `ModelSpec.build`."""
    linear = config.linear_layers
    return RotaryDecoder(config, context, lambda number: kimi_layer(config, context, number, linear=linear[number]))
