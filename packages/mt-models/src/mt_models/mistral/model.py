"""Mistral: the layers of Llama, with attention over a sliding window.

Information still gets further than the window: by sliding_window - 1 positions a layer.
"""

from __future__ import annotations

from mt_core.nn.environment import ModelEnvironment
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.rotary_decoder import RotaryDecoder, attention_core
from mt_models.blocks.transformer import TransformerLayer
from mt_models.mistral.config import MistralConfig


class MistralModel(RotaryDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    def __init__(self, config: MistralConfig, environment: ModelEnvironment) -> None:
        super().__init__(config, environment, lambda number: mistral_layer(config, environment, number))


def mistral_layer(config: MistralConfig, environment: ModelEnvironment, number: int) -> TransformerLayer:
    ctx = environment.parallel
    core = attention_core(config, environment, window=config.sliding_window)
    attention = SelfAttention(config, core, ctx, window=config.sliding_window)
    return TransformerLayer(config, core, environment.feed_forward(config.feed_forward, config, number), ctx, attention)


def build_mistral(config: MistralConfig, environment: ModelEnvironment) -> MistralModel:
    return MistralModel(config, environment)
