"""Llama: x + attention(norm(x)), then x + SwiGLU(norm(x)), with rotary positions."""

from __future__ import annotations

from mt_core.nn.environment import ModelEnvironment
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.rotary_decoder import RotaryDecoder, attention_core
from mt_models.blocks.transformer import TransformerLayer
from mt_models.llama.config import LlamaConfig


class LlamaModel(RotaryDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    def __init__(self, config: LlamaConfig, environment: ModelEnvironment) -> None:
        super().__init__(config, environment, lambda number: llama_layer(config, environment, number))


def llama_layer(config: LlamaConfig, environment: ModelEnvironment, number: int) -> TransformerLayer:
    ctx = environment.parallel
    core = attention_core(config, environment)
    bias = config.attention_bias
    attention = SelfAttention(config, core, ctx, qkv_bias=bias, output_bias=bias)
    return TransformerLayer(config, core, environment.feed_forward(config.feed_forward, config, number), ctx, attention)


def build_llama(config: LlamaConfig, environment: ModelEnvironment) -> LlamaModel:
    return LlamaModel(config, environment)
