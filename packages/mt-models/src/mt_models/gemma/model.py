"""Gemma 2 and 3: a norm before and after every block, alternating local and global attention.

    x = x + norm(attention(norm(x)))
    x = x + norm(GeGLU(norm(x)))

Norms multiply by 1 + weight, token embeddings by sqrt(hidden_size).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache, PagedScores
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.decoder import (
    CausalDecoder,
    DecoderConfigLike,
    EmbeddingConfigLike,
    TokenEmbedding,
    attention_core,
)
from mt_models.blocks.norm import ZeroCenteredRMSNorm
from mt_models.blocks.rotary import Rotary, RotaryAngles, build_rotary
from mt_models.gemma.config import GemmaConfig


class GemmaConfigLike(DecoderConfigLike, Protocol):
    """What `SoftcappedDecoder` reads from its configuration."""

    @property
    def final_logit_softcapping(self) -> float | None: ...
    @property
    def max_sequence_length(self) -> int: ...


class GemmaEmbedding(TokenEmbedding):
    """Token embeddings times sqrt(hidden_size), where the factor is rounded to the dtype of the embeddings."""

    def __init__(self, config: EmbeddingConfigLike, ctx: ParallelContext) -> None:
        super().__init__(config, ctx)
        self.scale = math.sqrt(config.hidden_size)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        x = super().forward(tokens, position_ids)
        # A tensor of no dimensions on the host: it multiplies like a number, without a copy to the device. In bf16 the
        # factor of hidden_size 3072 is 55.5 and not 55.4256, which trained weights rely on.
        return x * torch.tensor(self.scale, dtype=x.dtype)


class GemmaAttention(SelfAttention):
    """Attention whose scores are divided by sqrt(query_pre_attn_scalar) instead of sqrt(head size)."""

    def __init__(self, config: GemmaConfig, core: AttentionCore, ctx: ParallelContext, window: int | None) -> None:
        super().__init__(config, core, ctx, window=window)
        # The core divides by sqrt(head size).
        self.query_scale = math.sqrt(config.head_dim / (config.query_pre_attn_scalar or config.head_dim))
        self.logit_softcap = config.attn_logit_softcapping
        # Replaces the norms that SelfAttention has built: Gemma's multiply by 1 + weight.
        if config.qk_layernorm:
            self.q_layernorm = ZeroCenteredRMSNorm(config.head_dim, config.norm_epsilon, ctx, per_head=True)
            self.k_layernorm = ZeroCenteredRMSNorm(config.head_dim, config.norm_epsilon, ctx, per_head=True)

    def paged_scores(self, pattern: AttentionPattern) -> PagedScores:
        # attention_core gives the core its softcap. Paged decoding does not use the core, and is given it here.
        return replace(super().paged_scores(pattern), softcap=self.logit_softcap)


class GemmaLayer(nn.Module):
    """Layer `number` of the model, local or global: [batch, sequence, hidden] -> the same."""

    def __init__(self, config: GemmaConfig, context: ModelBuildContext, number: int) -> None:
        super().__init__()
        ctx, window = context.parallel, config.window_of(number)
        core = attention_core(config, context, window=window, logit_softcap=config.attn_logit_softcapping)
        self.input_layernorm = ZeroCenteredRMSNorm(config.hidden_size, config.norm_epsilon, ctx)
        self.self_attention: SelfAttention = GemmaAttention(config, core, ctx, window)
        self.post_self_attn_layernorm = ZeroCenteredRMSNorm(config.hidden_size, config.norm_epsilon, ctx)
        self.pre_mlp_layernorm = ZeroCenteredRMSNorm(config.hidden_size, config.norm_epsilon, ctx)
        self.mlp = context.feed_forward(config.feed_forward, config, number)
        self.post_mlp_layernorm = ZeroCenteredRMSNorm(config.hidden_size, config.norm_epsilon, ctx)

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        x, normed = self.input_layernorm.add(x)
        # The norm is on the branch, before the sum: the residual stream itself is never normalized.
        attended = self.post_self_attn_layernorm(self.self_attention(normed, pattern, angles, cache))
        x, normed = self.pre_mlp_layernorm.add(x, attended)
        return x + self.post_mlp_layernorm(self.mlp(normed))


class SoftcappedDecoder(CausalDecoder):
    """A decoder with rotary positions whose logits may have a soft cap: tokens [B, S] -> logits [B, S, vocab]"""

    config: GemmaConfigLike
    rotary: Rotary

    def angles(self, position_ids: Tensor, capacity: Tensor | None) -> RotaryAngles:
        return self.rotary.angles(position_ids, capacity)

    def frequencies_key(self, capacity: int) -> bytes:
        return self.rotary.key(capacity)

    @property
    def needs_logits(self) -> str | None:
        """Why a loss needs the logits."""
        cap = self.config.final_logit_softcapping
        return None if cap is None else f"model.final_logit_softcapping={cap} bends the logits"

    def logits(self, x: Tensor) -> Tensor:
        logits, cap = super().logits(x), self.config.final_logit_softcapping
        # cap * tanh(x / cap) is x for small x and stays within (-cap, cap).
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @property
    def max_sequence_length(self) -> int:
        return self.config.max_sequence_length


class GemmaModel(SoftcappedDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    def __init__(self, config: GemmaConfig, context: ModelBuildContext) -> None:
        ctx = context.parallel
        super().__init__(
            config,
            context,
            GemmaEmbedding,
            lambda number: GemmaLayer(config, context, number),
            lambda: ZeroCenteredRMSNorm(config.hidden_size, config.norm_epsilon, ctx),
        )
        self.rotary = build_rotary(config)


def build_gemma(config: GemmaConfig, context: ModelBuildContext) -> GemmaModel:
    return GemmaModel(config, context)
