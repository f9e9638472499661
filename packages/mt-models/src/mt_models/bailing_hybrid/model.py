"""Ling 3.0: pre-norm layers of Kimi delta attention or of rotary latent attention with gated heads, and MoE."""

from __future__ import annotations

from torch import nn

from mt_core.nn.build_context import ModelBuildContext
from mt_models.bailing_hybrid.config import BailingHybridConfig
from mt_models.blocks.decoder import attention_core
from mt_models.blocks.head_gated_latent_attention import HeadGatedLatentAttention
from mt_models.blocks.kimi_delta_net import FullRankKimiDeltaNet
from mt_models.blocks.predicting_decoder import PredictingDecoder
from mt_models.blocks.transformer import TransformerLayer


def bailing_layer(
    config: BailingHybridConfig, context: ModelBuildContext, number: int, *, linear: bool
) -> TransformerLayer:
    ctx, core = context.parallel, attention_core(config, context)
    attention: nn.Module
    if linear:
        attention = FullRankKimiDeltaNet(config, ctx, lower_bound=config.linear_decay_lower_bound, fp32_taps=True)
    else:
        remakes = context.recompute.selects("mla_up_proj")
        attention = HeadGatedLatentAttention(config, core, ctx, remakes_heads=remakes)
    feed_forward = context.feed_forward(config.feed_forward, config.of_layer(number), number)
    return TransformerLayer(config, core, feed_forward, ctx, attention)


def build_bailing_hybrid(config: BailingHybridConfig, context: ModelBuildContext) -> PredictingDecoder:
    """See `ModelSpec.build`. Layers of multi-token prediction are of latent attention."""
    linear = config.linear_layers
    counted = config.with_predicted_layers() if config.mtp_num_layers else config
    return PredictingDecoder(
        config,
        context,
        lambda number: bailing_layer(config, context, number, linear=linear[number]),
        lambda depth: bailing_layer(counted, context, config.num_layers + depth, linear=False),
    )
