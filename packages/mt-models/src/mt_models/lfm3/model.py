"""LFM3: layers with a gated short convolution, with attention within a window or with attention to everything.

x = x + norm(f(norm(x)))            f: the convolution, or attention with a gate for each head
x = x + norm(SwiGLU(norm(x)))
"""

from __future__ import annotations

from torch import Tensor, nn

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.decoder import RotaryDecoder, attention_core
from mt_models.blocks.head_gated_attention import HeadGatedAttention
from mt_models.blocks.rotary import (
    FixedRotary,
    RotaryAngles,
    RotaryByWindow,
    inverse_frequencies,
    proportional_frequencies,
)
from mt_models.blocks.sandwich_layer import SandwichLayer
from mt_models.blocks.short_conv import ShortConvLayer
from mt_models.blocks.transformer import TransformerLayer, block_norm
from mt_models.lfm3.config import Lfm3Config


class SandwichConvLayer(ShortConvLayer):
    """x + norm(short_conv(norm(x))), then x + norm(feed_forward(norm(x))): [batch, sequence, hidden] -> the same."""

    def __init__(self, config: Lfm3Config, feed_forward: nn.Module, ctx: ParallelContext) -> None:
        super().__init__(config, feed_forward, ctx)
        self.post_short_conv_layernorm = block_norm(config, ctx)
        self.post_mlp_layernorm = block_norm(config, ctx)

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        x, normed = self.input_layernorm.add(x)
        mixed = self.post_short_conv_layernorm(self.short_conv(normed, pattern, cache))
        x, normed = self.residual_and_norm(x, mixed, self.attention_dropout, self.pre_mlp_layernorm)
        return self.residual(x, self.post_mlp_layernorm(self.mlp(normed)), self.mlp_dropout)


def lfm3_layer(config: Lfm3Config, context: ModelBuildContext, number: int) -> TransformerLayer:
    """Layer `number` of the model."""
    ctx, feed_forward = context.parallel, context.feed_forward(config.feed_forward, config, number)
    if config.is_convolution(number):
        conv_layer = SandwichConvLayer if config.use_sandwich_norm else ShortConvLayer
        return conv_layer(config, feed_forward, ctx)
    core = attention_core(config, context, window=config.window_of(number))
    layer = SandwichLayer if config.use_sandwich_norm else TransformerLayer
    return layer(config, core, feed_forward, ctx, lfm3_attention(config, core, ctx, number))


def lfm3_attention(config: Lfm3Config, core: AttentionCore, ctx: ParallelContext, number: int) -> SelfAttention:
    """The attention of layer `number`."""
    attention = HeadGatedAttention if config.use_attention_gate else SelfAttention
    return attention(
        config,
        core,
        ctx,
        window=config.window_of(number),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
    )


class Lfm3Model(RotaryDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    def __init__(self, config: Lfm3Config, context: ModelBuildContext) -> None:
        super().__init__(config, context, lambda number: lfm3_layer(config, context, number))
        self.rotary = build_lfm3_rotary(config)


def build_lfm3_rotary(config: Lfm3Config) -> RotaryByWindow:
    """A share of the frequencies in layers without a window, all of them in those with one."""
    factor = config.rope_scaling_factor or 1.0
    everything = proportional_frequencies(config.head_dim, config.rotary_base, config.rotary_percent, factor)
    local = inverse_frequencies(config.head_dim, config.rotary_base_local)
    return RotaryByWindow(FixedRotary(everything), FixedRotary(local))


def build_lfm3(config: Lfm3Config, context: ModelBuildContext) -> Lfm3Model:
    """See `ModelSpec.build`."""
    return Lfm3Model(config, context)
