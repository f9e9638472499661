"""GPT-OSS: pre-norm layers of attention with sinks, every second one with a sliding window, and MoE."""

from __future__ import annotations

from mt_core.nn.environment import ModelEnvironment
from mt_models.blocks.rotary_decoder import RotaryDecoder, attention_core
from mt_models.blocks.transformer import TransformerLayer
from mt_models.gpt_oss.attention import SinkAttention
from mt_models.gpt_oss.config import GptOssConfig


class GptOssModel(RotaryDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    def __init__(self, config: GptOssConfig, environment: ModelEnvironment) -> None:
        super().__init__(config, environment, lambda number: gpt_oss_layer(config, environment, number))


def gpt_oss_layer(config: GptOssConfig, environment: ModelEnvironment, number: int) -> TransformerLayer:
    ctx, window = environment.parallel, config.window_of(number)
    core = attention_core(config, environment, window=window, sinks=True)
    attention = SinkAttention(config, core, ctx, window=window)
    return TransformerLayer(config, core, environment.feed_forward(config.feed_forward, config, number), ctx, attention)


def build_gpt_oss(config: GptOssConfig, environment: ModelEnvironment) -> GptOssModel:
    return GptOssModel(config, environment)
