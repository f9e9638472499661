"""Hybrids: each layer is x + block(norm(x)) with one block, Mamba-2, attention, or a feed-forward."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_core.nn.dropout import Dropout
from mt_core.nn.layout import normal
from mt_core.nn.model import NumberedLayers
from mt_core.nn.norm import build_norm
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.embedding import LearnedTable, like_token_embeddings
from mt_models.blocks.mamba_mixer import MambaMixer
from mt_models.blocks.mixed_decoder import (
    AttentionLayer,
    FeedForwardLayer,
    MambaLayer,
    MixedDecoder,
    MixedEmbedding,
    scaled,
)
from mt_models.blocks.multi_token import TokenPrediction
from mt_models.blocks.predicting_decoder import PredictsTokens
from mt_models.blocks.residual_streams import DecoderOnStreams, stream_connection
from mt_models.blocks.rotary import FixedRotary, RotaryAngles, inverse_frequencies
from mt_models.blocks.stream_prediction import StreamPrediction
from mt_models.hybrid.config import ATTENTION, EXPERTS, MAMBA, HybridConfig


class HybridEmbedding(MixedEmbedding):
    """Token embeddings times embedding_multiplier, plus learned positions if configured, then dropout."""

    def __init__(self, config: HybridConfig, ctx: ParallelContext) -> None:
        super().__init__(config, ctx)
        self.multiplier = config.embedding_multiplier
        self.dropout = Dropout(config.hidden_dropout, ctx)
        self.position_embeddings: LearnedTable | None = None
        if config.table_size is not None:
            init = normal(config.init_method_std)
            self.position_embeddings = LearnedTable(config.table_size, config.hidden_size, init, ctx)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        x = scaled(self.word_embeddings(tokens), self.multiplier)
        if self.position_embeddings is not None:
            x = x + like_token_embeddings(self.position_embeddings(position_ids), self.ctx)
        return self.dropout(self.stream(x))


class PredictedLayers(nn.Module):
    """The layers of one depth of multi-token prediction, one after another: [B, S, H] -> the same."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = NumberedLayers(enumerate(layers))

    def forward(self, x: Tensor, pattern: AttentionPattern, angles: RotaryAngles | None, cache: Cache | None) -> Tensor:
        for number in self.layers.numbers():
            x = self.layers[number](x, pattern, angles, cache)
        return x


class HybridModel(DecoderOnStreams, PredictsTokens, MixedDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    config: HybridConfig
    embedding_type = HybridEmbedding

    def __init__(self, config: HybridConfig, context: ModelBuildContext) -> None:
        super().__init__(config, context, lambda number: hybrid_layer(config, context, number))
        self.add_streams(config, context)
        self.rotary: FixedRotary | None = None
        if config.position_embedding_type == "rope":
            self.rotary = FixedRotary(inverse_frequencies(config.rotary_dim, config.rotary_base))
        counted, size = config.with_predicted_layers(), len(config.predicted_pattern)

        def depth_layers(depth: int) -> PredictedLayers:
            first = config.num_layers + depth * size
            return PredictedLayers([hybrid_layer(counted, context, first + place) for place in range(size)])

        self.depth_type = StreamPrediction if config.enable_mhc_connections else TokenPrediction
        self.add_prediction(config, context, depth_layers)

    def angles(self, position_ids: Tensor, capacity: Tensor | None) -> RotaryAngles | None:
        return None if self.rotary is None else self.rotary.angles(position_ids)

    @property
    def max_sequence_length(self) -> int | None:
        """Longest supported sequence; None without learned positions."""
        return self.config.table_size

    @property
    def needs_logits(self) -> str | None:
        """Why a loss needs the logits."""
        scale = self.config.logits_scaling
        return None if scale == 1.0 else f"model.logits_scaling={scale} divides the logits"

    def scaled_logits(self, logits: Tensor) -> Tensor:
        # After the product, as in transformers: dividing x before it would round differently in bf16.
        return logits if self.config.logits_scaling == 1.0 else logits / self.config.logits_scaling


def hybrid_layer(config: HybridConfig, context: ModelBuildContext, number: int) -> nn.Module:
    """The layer that the pattern has at this place."""
    ctx = context.parallel
    norm = build_norm(config.normalization, config.hidden_size, config.norm_epsilon, ctx)
    connection = stream_connection(config, context) if config.enable_mhc_connections else None
    common = norm, Dropout(config.hidden_dropout, ctx), config.residual_multiplier, connection
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
