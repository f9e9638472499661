"""Granite: the layers of Llama, dense or MoE, with four factors."""

from __future__ import annotations

import math

from torch import Tensor

from mt_core.nn.attention import AttentionCore
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.dropout import Dropout
from mt_core.nn.norm import Norm
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.decoder import CausalDecoder, TokenEmbedding, attention_core
from mt_models.blocks.rotary import RotaryAngles, build_rotary
from mt_models.blocks.transformer import TransformerLayer
from mt_models.granite.config import GraniteFactorsConfig


class GraniteEmbedding(TokenEmbedding):
    """Token embeddings times embedding_multiplier."""

    def __init__(self, config: GraniteFactorsConfig, ctx: ParallelContext) -> None:
        super().__init__(config, ctx)
        self.multiplier = config.embedding_multiplier

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        return super().forward(tokens, position_ids) * self.multiplier


class GraniteAttention(SelfAttention):
    """Scores are multiplied by attention_multiplier instead of 1 / sqrt(head size)."""

    def __init__(self, config: GraniteFactorsConfig, core: AttentionCore, ctx: ParallelContext) -> None:
        bias = config.add_attention_output_bias
        super().__init__(config, core, ctx, qkv_bias=config.add_qkv_bias, output_bias=bias)
        # The core divides by sqrt(head size).
        self.query_scale = (config.attention_multiplier or config.head_dim**-0.5) * math.sqrt(config.head_dim)


class GraniteLayer(TransformerLayer):
    """Both branches are multiplied by residual_multiplier."""

    def __init__(self, config: GraniteFactorsConfig, context: ModelBuildContext, number: int) -> None:
        ctx, core = context.parallel, attention_core(config, context)
        feed_forward = context.feed_forward(config.feed_forward, config, number)
        super().__init__(config, core, feed_forward, ctx, GraniteAttention(config, core, ctx))
        self.multiplier = config.residual_multiplier

    def residual(self, x: Tensor, branch: Tensor, dropout: Dropout) -> Tensor:
        return super().residual(x, branch * self.multiplier, dropout)

    def residual_and_norm(self, x: Tensor, branch: Tensor, dropout: Dropout, norm: Norm) -> tuple[Tensor, Tensor]:
        if dropout.rate > 0.0:
            return norm.add(self.residual(x, branch, dropout))
        # Without dropout `residual` is not called: the norm's kernel adds, so that the factor is applied here too.
        return norm.add(x, branch * self.multiplier)


class GraniteModel(CausalDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    config: GraniteFactorsConfig

    def __init__(self, config: GraniteFactorsConfig, context: ModelBuildContext) -> None:
        super().__init__(config, context, GraniteEmbedding, lambda number: GraniteLayer(config, context, number))
        self.rotary = build_rotary(config)

    def angles(self, position_ids: Tensor, capacity: Tensor | None) -> RotaryAngles:
        return self.rotary.angles(position_ids, capacity)

    def frequencies_key(self, capacity: int) -> bytes:
        return self.rotary.key(capacity)

    @property
    def needs_logits(self) -> str | None:
        """Why a loss needs the logits."""
        scale = self.config.logits_scaling
        return None if scale == 1.0 else f"model.logits_scaling={scale} divides the logits"

    def logits(self, x: Tensor) -> Tensor:
        # After the product, as in transformers: dividing x before it would round differently in bf16.
        return super().logits(x) / self.config.logits_scaling

    @property
    def max_sequence_length(self) -> int:
        return self.config.max_sequence_length


def build_granite(config: GraniteFactorsConfig, context: ModelBuildContext) -> GraniteModel:
    return GraniteModel(config, context)
