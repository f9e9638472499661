"""Llama 4: the layers of Llama with attention within chunks, or without positions, and MoE."""

from __future__ import annotations

from mt_core.nn.build_context import ModelBuildContext
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.chunked_attention import ChunkedAttention, ChunkedPatterns
from mt_models.blocks.decoder import RotaryDecoder, attention_core, rotary_attention
from mt_models.blocks.norm import ScaleFreeRMSNorm
from mt_models.blocks.transformer import TransformerLayer
from mt_models.llama4.config import Llama4Config


def llama4_attention(
    config: Llama4Config, context: ModelBuildContext, patterns: ChunkedPatterns | None, number: int
) -> SelfAttention:
    """The attention of layer `number`. patterns: None where layers have no chunks."""
    core = attention_core(config, context, window=config.chunk_of(number))
    attention = (
        rotary_attention(config, core, context.parallel, number)
        if patterns is None or config.chunk_of(number) is None
        else ChunkedAttention(
            config,
            core,
            context.parallel,
            patterns=patterns,
            window=config.chunk_of(number),
            qkv_bias=config.add_qkv_bias,
            output_bias=config.add_attention_output_bias,
            norms_after_rotary=True,
        )
    )
    if config.qk_l2_norm and config.rotates(number):
        attention.q_layernorm = ScaleFreeRMSNorm(config.norm_epsilon)
        attention.k_layernorm = ScaleFreeRMSNorm(config.norm_epsilon)
    return attention


def build_llama4(config: Llama4Config, context: ModelBuildContext) -> RotaryDecoder:
    chunk = config.attention_chunk_size
    patterns = None if chunk is None else ChunkedPatterns(chunk)

    def layer(number: int) -> TransformerLayer:
        attention = llama4_attention(config, context, patterns, number)
        feed_forward = context.feed_forward(config.feed_forward, config, number)
        return TransformerLayer(config, attention.core, feed_forward, context.parallel, attention)

    return RotaryDecoder(config, context, layer)
