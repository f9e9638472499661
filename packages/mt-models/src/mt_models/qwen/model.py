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
        windows = [config.window_of(layer) for layer in range(config.num_layers)]
        super().__init__(config, environment, [qwen_layer(config, environment, window) for window in windows])


def qwen_layer(config: QwenConfig, environment: ModelEnvironment, window: int | None) -> TransformerLayer:
    ctx = environment.parallel
    core = attention_core(config, environment, window=window)
    attention = SelfAttention(config, core, ctx, window=window)
    return TransformerLayer(config, core, environment.feed_forward(config.feed_forward, config), ctx, attention)


def build_qwen(config: QwenConfig, environment: ModelEnvironment) -> QwenModel:
    return QwenModel(config, environment)
