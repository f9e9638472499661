"""The GPT model: token and position embeddings, a stack of transformer layers, logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.dropout import Dropout
from mt_core.nn.layout import normal
from mt_core.nn.norm import build_norm
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.decoder import CausalDecoder, TokenEmbedding
from mt_models.blocks.embedding import LearnedTable, like_token_embeddings
from mt_models.blocks.position_bias import alibi_slopes
from mt_models.blocks.rotary import FixedRotary, RotaryAngles, inverse_frequencies
from mt_models.blocks.transformer import ParallelResidualLayer, TransformerLayer
from mt_models.gpt.config import GPTConfig


class GPTEmbedding(TokenEmbedding):
    """Token embeddings, plus learned positions or a norm if configured, then dropout."""

    def __init__(self, config: GPTConfig, ctx: ParallelContext) -> None:
        super().__init__(config, ctx)
        self.dropout = Dropout(config.hidden_dropout, ctx)
        self.position_embeddings: LearnedTable | None = None
        if config.table_size is not None:
            init = normal(config.init_method_std)
            self.position_embeddings = LearnedTable(config.table_size, config.hidden_size, init, ctx)
        self.layernorm: nn.Module | None = None
        if config.embedding_layernorm:
            self.layernorm = build_norm(config.normalization, config.hidden_size, config.norm_epsilon, ctx)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        x = super().forward(tokens, position_ids)
        if self.position_embeddings is not None:
            x = x + like_token_embeddings(self.position_embeddings(position_ids), self.ctx)
        if self.layernorm is not None:
            # BLOOM: before dropout, which a norm would rescale.
            x = self.layernorm(x)
        return self.dropout(x)


class GPTModel(CausalDecoder):
    """tokens [B, S] -> logits [B, S, vocab] over the true vocabulary."""

    config: GPTConfig

    def __init__(self, config: GPTConfig, context: ModelBuildContext) -> None:
        ctx = context.parallel
        super().__init__(config, context, GPTEmbedding, lambda number: gpt_layer(config, context, number))
        self.slopes: Tensor | None = None
        if config.position_embedding_type == "alibi":
            # [heads of this rank]
            self.slopes = alibi_slopes(config.num_attention_heads).chunk(ctx.tp.size)[ctx.tp.rank]
        self.rotary: FixedRotary | None = None
        if config.position_embedding_type == "rope":
            self.rotary = FixedRotary(inverse_frequencies(config.rotary_dim, config.rotary_base))

    def pattern(self, segment_ids: Tensor | None, device: torch.device) -> AttentionPattern:
        if self.slopes is not None:
            self.slopes = self.slopes.to(device)
        return AttentionPattern(segment_ids=segment_ids, alibi_slopes=self.slopes)

    def angles(self, position_ids: Tensor, capacity: Tensor | None) -> RotaryAngles | None:
        return None if self.rotary is None else self.rotary.angles(position_ids)

    @property
    def max_sequence_length(self) -> int | None:
        """Longest supported sequence; None without learned positions."""
        return self.config.table_size


def gpt_layer(config: GPTConfig, context: ModelBuildContext, number: int) -> TransformerLayer:
    core = context.attention(
        config.attention_backend,
        num_heads=config.num_attention_heads,
        num_query_groups=config.query_groups,
        head_dim=config.head_dim,
        dropout=config.attention_dropout,
        bias=config.position_embedding_type == "alibi",
    )
    layer_type = ParallelResidualLayer if config.parallel_residual else TransformerLayer
    feed_forward = context.feed_forward(config.feed_forward, config, number)
    return layer_type(config, core, feed_forward, context.parallel)


def build_gpt(config: GPTConfig, context: ModelBuildContext) -> GPTModel:
    return GPTModel(config, context)
