"""Qwen2-MoE and Qwen3-MoE: the layers of Qwen with MoE."""

from __future__ import annotations

from mt_core.nn.environment import ModelEnvironment
from mt_models.blocks.rotary_decoder import RotaryDecoder, attention_core
from mt_models.blocks.transformer import TransformerLayer
from mt_models.qwen_moe.config import QwenMoeConfig


class QwenMoeModel(RotaryDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    def __init__(self, config: QwenMoeConfig, environment: ModelEnvironment) -> None:
        super().__init__(config, environment, lambda number: qwen_moe_layer(config, environment, number))


def qwen_moe_layer(config: QwenMoeConfig, environment: ModelEnvironment, number: int) -> TransformerLayer:
    feed_forward = environment.feed_forward(config.feed_forward, config, number)
    return TransformerLayer(config, attention_core(config, environment), feed_forward, environment.parallel)


def build_qwen_moe(config: QwenMoeConfig, environment: ModelEnvironment) -> QwenMoeModel:
    return QwenMoeModel(config, environment)
