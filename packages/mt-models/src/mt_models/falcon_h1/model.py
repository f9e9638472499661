"""Falcon-H1: layers in which a Mamba-2 mixer and attention read the same norm, and a feed-forward follows.

With n = norm(x):

    x <- x + ssm_out mamba(ssm_in n) + attention_out attention(attention_in n)
    x <- x + feed_forward(norm(x))
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_core.nn.feed_forward import DenseFeedForward
from mt_core.nn.norm import build_norm
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.mamba_mixer import MambaMixer
from mt_models.blocks.mixed_decoder import MixedDecoder, MixedEmbedding, scaled
from mt_models.blocks.rotary import FixedRotary, RotaryAngles, inverse_frequencies
from mt_models.falcon_h1.config import FalconH1Config


class ScaledMambaMixer(MambaMixer):
    """A mixer with a factor on each part of its input projection, and with or without the norm of its gated output."""

    def __init__(self, config: FalconH1Config, ctx: ParallelContext) -> None:
        super().__init__(config, ctx, config.output_init_std)
        self.factors, self.has_norm = config.ssm_multipliers, config.mamba_gated_norm
        if not self.has_norm:
            del self.norm

    def project(self, hidden: Tensor) -> tuple[Tensor, ...]:
        return tuple(scaled(part, factor) for part, factor in zip(super().project(hidden), self.factors, strict=True))

    def gated(self, y: Tensor, z: Tensor) -> Tensor:
        return super().gated(y, z) if self.has_norm else y * F.silu(z)


class ScaledFeedForward(DenseFeedForward):
    """down linear_fc2(silu(gate g) u), with g and u the halves of linear_fc1(x): [B, S, H] -> the same."""

    def __init__(self, config: FalconH1Config, ctx: ParallelContext) -> None:
        super().__init__(config, ctx)
        self.gate, self.down = config.mlp_multipliers

    def forward(self, x: Tensor) -> Tensor:
        if self.gate == 1.0:
            return scaled(super().forward(x), self.down)
        gate, up = self.linear_fc1(x).chunk(2, -1)
        return scaled(self.linear_fc2(F.silu(gate * self.gate) * up), self.down)


class FalconH1Layer(nn.Module):
    """[batch, sequence, hidden] -> the same, x in the dtype of the residual stream."""

    def __init__(self, config: FalconH1Config, context: ModelBuildContext) -> None:
        super().__init__()
        ctx = context.parallel
        self.config, self.dtype = config, ctx.params_dtype
        self.input_layernorm = build_norm("RMSNorm", config.hidden_size, config.norm_epsilon, ctx)
        self.mixer = ScaledMambaMixer(config, ctx)
        self.self_attention = self_attention(config, context)
        self.pre_mlp_layernorm = build_norm("RMSNorm", config.hidden_size, config.norm_epsilon, ctx)
        self.mlp = ScaledFeedForward(config, ctx)

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        config = self.config
        x, normed = self.input_layernorm.add(x)
        normed = normed.to(self.dtype)
        mixed = self.mixer(scaled(normed, config.ssm_in_multiplier), pattern.segment_ids, cache)
        attended = self.self_attention(scaled(normed, config.attention_in_multiplier), pattern, angles, cache)
        added = scaled(mixed, config.ssm_out_multiplier) + scaled(attended, config.attention_out_multiplier)
        x, normed = self.pre_mlp_layernorm.add(x, added)
        return x + self.mlp(normed.to(self.dtype))


def self_attention(config: FalconH1Config, context: ModelBuildContext) -> SelfAttention:
    core = context.attention(
        config.attention_backend,
        num_heads=config.num_attention_heads,
        num_query_groups=config.query_groups,
        head_dim=config.head_dim,
        dropout=config.attention_dropout,
    )
    attention = SelfAttention(config, core, context.parallel)
    # On the queries in place of the keys: scores are products of the two.
    attention.query_scale = config.key_multiplier
    return attention


class FalconH1Embedding(MixedEmbedding):
    """Token embeddings times embedding_multiplier."""

    def __init__(self, config: FalconH1Config, ctx: ParallelContext) -> None:
        super().__init__(config, ctx)
        self.multiplier = config.embedding_multiplier

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        return scaled(super().forward(tokens, position_ids), self.multiplier)


class FalconH1Model(MixedDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    config: FalconH1Config
    embedding_type = FalconH1Embedding

    def __init__(self, config: FalconH1Config, context: ModelBuildContext) -> None:
        super().__init__(config, context, lambda number: FalconH1Layer(config, context))
        self.rotary = FixedRotary(inverse_frequencies(config.rotary_dim, config.rotary_base))

    def angles(self, position_ids: Tensor, capacity: Tensor | None) -> RotaryAngles:
        return self.rotary.angles(position_ids)

    @property
    def max_sequence_length(self) -> int | None:
        """None: there is no longest sequence."""
        return None

    @property
    def needs_logits(self) -> str | None:
        """Why a loss needs the logits."""
        factor = self.config.lm_head_multiplier
        return None if factor == 1.0 else f"model.lm_head_multiplier={factor} multiplies the logits"

    def logits(self, x: Tensor) -> Tensor:
        return scaled(super().logits(x), self.config.lm_head_multiplier)


def build_falcon_h1(config: FalconH1Config, context: ModelBuildContext) -> FalconH1Model:
    """See `ModelSpec.build`."""
    return FalconH1Model(config, context)
