"""AFMoE: gated attention and experts, with a norm before and behind each.

    x = x + norm(linear_proj(attention * sigmoid(gate)))        both of norm(x)
    x = x + norm(experts(norm(x)))                              or the dense feed-forward, in the first layers

Layers with a window have rotary positions; those that see everything have none. Token embeddings may be multiplied by
sqrt(hidden_size).
"""

from __future__ import annotations

import math

from torch import Tensor

from mt_core.nn.build_context import ModelBuildContext
from mt_core.parallel.context import ParallelContext
from mt_models.afmoe.config import AfmoeConfig
from mt_models.blocks.decoder import CausalDecoder, TokenEmbedding, attention_core
from mt_models.blocks.gated_attention import GatedSelfAttention
from mt_models.blocks.rotary import RotaryAngles, build_rotary
from mt_models.blocks.sandwich_layer import SandwichLayer


class AfmoeEmbedding(TokenEmbedding):
    """Token embeddings, times sqrt(hidden_size) where model.mup_enabled says so."""

    def __init__(self, config: AfmoeConfig, ctx: ParallelContext) -> None:
        super().__init__(config, ctx)
        self.scale = math.sqrt(config.hidden_size) if config.mup_enabled else 1.0

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        return super().forward(tokens, position_ids) * self.scale


def afmoe_layer(config: AfmoeConfig, context: ModelBuildContext, number: int) -> SandwichLayer:
    """Layer `number` of the model."""
    ctx, window = context.parallel, config.window_of(number)
    core = attention_core(config, context, window=window)
    attention = GatedSelfAttention(config, core, ctx, window=window, rotates=config.rotates(number))
    return SandwichLayer(config, core, context.feed_forward(config.feed_forward, config, number), ctx, attention)


class AfmoeModel(CausalDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    config: AfmoeConfig

    def __init__(self, config: AfmoeConfig, context: ModelBuildContext) -> None:
        super().__init__(config, context, AfmoeEmbedding, lambda number: afmoe_layer(config, context, number))
        self.rotary = build_rotary(config)

    def angles(self, position_ids: Tensor, capacity: Tensor | None) -> RotaryAngles:
        return self.rotary.angles(position_ids, capacity)

    def frequencies_key(self, capacity: int) -> bytes:
        return self.rotary.key(capacity)

    @property
    def max_sequence_length(self) -> int:
        return self.config.max_sequence_length


def build_afmoe(config: AfmoeConfig, context: ModelBuildContext) -> AfmoeModel:
    """See `ModelSpec.build`."""
    return AfmoeModel(config, context)
