"""OLMo-Hybrid: x + delta_net(norm(x)), in every fourth layer x + norm(attention(x)); feed-forwards in the same form."""

from __future__ import annotations

from mt_core.nn.build_context import ModelBuildContext
from mt_models.blocks.decoder import RotaryDecoder, attention_core, rotary_layer
from mt_models.blocks.gated_delta_net import GatedDeltaNet, log_uniform
from mt_models.blocks.mamba_mixer import time_step_bias
from mt_models.blocks.transformer import TransformerLayer
from mt_models.olmo_hybrid.config import OlmoHybridConfig


def delta_net_layer(config: OlmoHybridConfig, context: ModelBuildContext, number: int) -> TransformerLayer:
    ctx, core = context.parallel, attention_core(config, context)
    block = GatedDeltaNet(
        config,
        ctx,
        decay_rates=log_uniform(config.linear_a_log_min, config.linear_a_log_max),
        time_step_bias=time_step_bias(config.linear_dt_min, config.linear_dt_max, config.linear_dt_init_floor),
    )
    return TransformerLayer(config, core, context.feed_forward(config.feed_forward, config, number), ctx, block)


def build_olmo_hybrid(config: OlmoHybridConfig, context: ModelBuildContext) -> RotaryDecoder:
    """See `ModelSpec.build`."""
    linear = config.linear_layers

    def layer(number: int) -> TransformerLayer:
        return (delta_net_layer if linear[number] else rotary_layer)(config, context, number)

    return RotaryDecoder(config, context, layer)
