"""Hybrids: each layer is x + block(norm(x)) with one block, Mamba-2, attention, or a feed-forward."""

from __future__ import annotations

import math

from torch import Tensor, nn

from mt_core.nn.build_context import ModelBuildContext
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.decoder import TokenEmbedding
from mt_models.blocks.mamba_mixer import MambaMixer
from mt_models.blocks.mixed_decoder import AttentionLayer, FeedForwardLayer, MambaLayer, MixedDecoder, scaled
from mt_models.blocks.rotary import FixedRotary, RotaryAngles, inverse_frequencies
from mt_models.hybrid.config import ATTENTION, EXPERTS, MAMBA, HybridConfig


class HybridEmbedding(TokenEmbedding):
    """Token embeddings times embedding_multiplier."""

    def __init__(self, config: HybridConfig, ctx: ParallelContext) -> None:
        super().__init__(config, ctx)
        self.multiplier = config.embedding_multiplier

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        return scaled(super().forward(tokens, position_ids), self.multiplier)


class HybridModel(MixedDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    config: HybridConfig
    embedding_type = HybridEmbedding

    def __init__(self, config: HybridConfig, context: ModelBuildContext) -> None:
        super().__init__(config, context, lambda number: hybrid_layer(config, context, number))
        self.rotary: FixedRotary | None = None
        if config.position_embedding_type == "rope":
            self.rotary = FixedRotary(inverse_frequencies(config.rotary_dim, config.rotary_base))

    def angles(self, position_ids: Tensor, capacity: Tensor | None) -> RotaryAngles | None:
        return None if self.rotary is None else self.rotary.angles(position_ids)

    @property
    def needs_logits(self) -> str | None:
        """Why a loss needs the logits."""
        scale = self.config.logits_scaling
        return None if scale == 1.0 else f"model.logits_scaling={scale} divides the logits"

    def logits(self, x: Tensor) -> Tensor:
        # After the product, as in transformers: dividing x before it would round differently in bf16.
        rows = super().logits(x)
        return rows if self.config.logits_scaling == 1.0 else rows / self.config.logits_scaling


def hybrid_layer(config: HybridConfig, context: ModelBuildContext, number: int) -> nn.Module:
    """The layer that the pattern has at this place."""
    ctx = context.parallel
    common = config.hidden_size, config.norm_epsilon, ctx, config.residual_multiplier
    symbol = config.layers[number]
    if symbol == MAMBA:
        return MambaLayer(MambaMixer(config, ctx, config.output_init_std), *common)
    if symbol == ATTENTION:
        return AttentionLayer(self_attention(config, context), *common)
    # - or E; check_pattern has refused other symbols.
    feed_forward = context.feed_forward("moe" if symbol == EXPERTS else "dense", config, number)
    return FeedForwardLayer(feed_forward, *common)


def self_attention(config: HybridConfig, context: ModelBuildContext) -> SelfAttention:
    core = context.attention(
        config.attention_backend,
        num_heads=config.num_attention_heads,
        num_query_groups=config.query_groups,
        head_dim=config.head_dim,
        dropout=config.attention_dropout,
    )
    attention = SelfAttention(config, core, context.parallel)
    if config.attention_multiplier is not None:
        # The core divides by sqrt(head size).
        attention.query_scale = config.attention_multiplier * math.sqrt(config.head_dim)
    return attention


def build_hybrid(config: HybridConfig, context: ModelBuildContext) -> HybridModel:
    return HybridModel(config, context)
