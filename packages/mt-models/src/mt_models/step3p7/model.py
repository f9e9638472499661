"""The decoder of Step-3.5 and Step-3.7: pre-norm layers of gated heads and of MoE, most of them with a window.

q, k = norm(W_q x), norm(W_k x) of each head, the first channels rotated; out = W_o (sigmoid(w_n x) attention_n)
expert: W_2 (min(silu(g), L) clip(u, -L, L)), (g, u) = W_1 x, with limits L of some layers; all norms multiply by 1 + w
layers with a window: other query heads, another rotary base and another rotated share
"""

from __future__ import annotations

from functools import partial

from mt_core.nn.build_context import ModelBuildContext
from mt_models.blocks.decoder import RotaryDecoder, attention_core
from mt_models.blocks.head_gated_attention import HeadGatedAttention
from mt_models.blocks.norm import ZeroCenteredRMSNorm
from mt_models.blocks.rotary import FixedRotary, RotaryByWindow, inverse_frequencies, scaled_rotary
from mt_models.blocks.transformer import TransformerLayer
from mt_models.step3p7.config import Step3p7Config


class Step3p7Layer(TransformerLayer):
    """x + attention(norm(x)), then x + feed_forward(norm(x)): [batch, sequence, hidden] -> the same."""

    def __init__(self, config: Step3p7Config, context: ModelBuildContext, number: int) -> None:
        ctx, window, described = context.parallel, config.window_of(number), config.of_layer(number)
        core, bias = attention_core(described, context, window=window), config.attention_bias
        attention = HeadGatedAttention(described, core, ctx, window=window, qkv_bias=bias, output_bias=bias)
        feed_forward = context.feed_forward(config.feed_forward, described, number)
        super().__init__(described, core, feed_forward, ctx, attention)
        # Replace the norms that attention and TransformerLayer have built: these multiply by 1 + weight.
        norm = partial(ZeroCenteredRMSNorm, eps=config.norm_epsilon, ctx=ctx)
        attention.q_layernorm = norm(config.head_dim, per_head=True)
        attention.k_layernorm = norm(config.head_dim, per_head=True)
        self.input_layernorm = norm(config.hidden_size)
        self.pre_mlp_layernorm = norm(config.hidden_size)


class Step3p7Model(RotaryDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    config: Step3p7Config

    def __init__(self, config: Step3p7Config, context: ModelBuildContext) -> None:
        super().__init__(
            config,
            context,
            lambda number: Step3p7Layer(config, context, number),
            partial(ZeroCenteredRMSNorm, config.hidden_size, config.norm_epsilon, context.parallel),
        )
        self.rotary = build_step3p7_rotary(config)


def build_step3p7_rotary(config: Step3p7Config) -> RotaryByWindow:
    """Scaled frequencies of layers without a window, and those of layers with one."""
    rotated = int(config.head_dim * config.rotary_percent_local)
    local = inverse_frequencies(rotated, config.rotary_base_local)
    return RotaryByWindow(scaled_rotary(config), FixedRotary(local))


def build_step3p7(config: Step3p7Config, context: ModelBuildContext) -> Step3p7Model:
    """See `ModelSpec.build`."""
    return Step3p7Model(config, context)
