"""Qwen: the layers of Llama, with a bias on queries, keys and values (Qwen2) or normalized heads (Qwen3)."""

from __future__ import annotations

from mt_core.nn.environment import ModelEnvironment
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.rotary_decoder import RotaryDecoder, attention_core
from mt_models.blocks.transformer import TransformerLayer
from mt_models.qwen.config import QwenConfig


class QwenModel(RotaryDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    def __init__(self, config: QwenConfig, environment: ModelEnvironment) -> None:
        super().__init__(config, environment, lambda number: qwen_layer(config, environment, number))


def qwen_layer(config: QwenConfig, environment: ModelEnvironment, number: int) -> TransformerLayer:
    ctx, window = environment.parallel, config.window_of(number)
    core = attention_core(config, environment, window=window)
    attention = SelfAttention(config, core, ctx, window=window)
    return TransformerLayer(config, core, environment.feed_forward(config.feed_forward, config, number), ctx, attention)


def build_qwen(config: QwenConfig, environment: ModelEnvironment) -> QwenModel:
    return QwenModel(config, environment)
