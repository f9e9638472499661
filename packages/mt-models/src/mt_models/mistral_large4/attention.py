"""Attention of Mistral Large 4: latents that layers share, queries with learned factors of their positions.

For a position t, with s_h and b_h learned for each head:

    q_t,h = (s_h ln(t + 1) + b_h) q'_t,h      q' from the hidden state, its positional channels rotated

Layers without positions rotate nothing: all channels of their keys come from the latent. The queries of the indexer
come from LayerNorm(x), and have learned factors, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mt_core.nn.attention import AttentionCore
from mt_core.nn.cache import PagedScores, Pages
from mt_core.nn.layout import LayoutModule, ParameterLayout, Split, ones, sequence_axes, zeros
from mt_core.nn.norm import build_norm
from mt_core.parallel.context import AxisName, ParallelContext
from mt_models.blocks.indexer import Indexer
from mt_models.blocks.latent_attention import LatentAttention
from mt_models.blocks.rotary import RotaryAngles, scaled_rotary
from mt_models.blocks.sparse_latent_attention import Choices, SparseLatentAttention
from mt_models.mistral_large4.config import MistralLarge4Config


class QueryFactors(LayoutModule):
    """x_h (scale_h ln(p + 1) + bias_h) for heads h at positions p. scale, bias: [heads]

    sharded: each tensor-parallel rank has its own heads, else all ranks have all of them. partial_gradient: see
    `ParameterLayout`.
    """

    scale: Tensor
    bias: Tensor

    def __init__(
        self, heads: int, ctx: ParallelContext, *, sharded: bool = False, partial_gradient: tuple[AxisName, ...] = ()
    ) -> None:
        super().__init__(ctx)
        splits = (Split(dim=0, axis="tp"),) if sharded else ()
        for name, init in (("scale", zeros), ("bias", ones)):
            self.declare(name, ParameterLayout((heads,), init, splits, partial_gradient=partial_gradient))

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """x [B, S, N, D], position_ids [B or 1, S] -> [B, S, N, D]"""
        logs = (position_ids + 1).float().log().to(x.dtype)[..., None]  # [B or 1, S, 1]
        return x * (self.scale.to(x.dtype) * logs + self.bias.to(x.dtype))[..., None]


class LearnedRotary(LayoutModule):
    """The frequencies of a configuration times exp(alpha), alpha [D / 2] of the checkpoint, which is not trained."""

    alpha: Tensor

    def __init__(self, config: MistralLarge4Config, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.fixed = scaled_rotary(config)
        layout = ParameterLayout((config.rotary_dim // 2,), zeros, dtype=torch.float32, trained=False)
        self.declare("alpha", layout)

    def angles(self, position_ids: Tensor, capacity: Tensor | None = None) -> RotaryAngles:
        fixed = self.fixed.angles(position_ids, capacity)
        return RotaryAngles(position_ids, fixed.frequencies * self.alpha.detach().float().exp(), fixed.scale)

    def key(self, capacity: int) -> bytes:
        return self.fixed.key(capacity)


class HiddenStateIndexer(Indexer):
    """An indexer whose queries come from the hidden state, and grow by learned factors with their positions."""

    def __init__(self, config: MistralLarge4Config, ctx: ParallelContext, *, rotates: bool) -> None:
        super().__init__(config, ctx, query_size=config.hidden_size)
        self.rotates = rotates
        self.q_input_norm = build_norm("LayerNorm", config.hidden_size, config.dsa_indexer_k_norm_epsilon, ctx)
        self.query_factors = QueryFactors(self.heads, ctx, partial_gradient=sequence_axes(ctx))

    def query_heads(self, source: Tensor, angles: RotaryAngles) -> Tensor:
        heads = super().query_heads(self.q_input_norm(source), angles)
        return self.query_factors(heads, self.own_positions(angles.position_ids))

    def rotated(self, heads: Tensor, angles: RotaryAngles) -> Tensor:
        return super().rotated(heads, angles) if self.rotates else heads


class SharedLatentAttention(SparseLatentAttention):
    """Layer `number`: latents of its own, or of the layer that `model.kv_source_layers` names.

    config: that of the whole model.
    """

    def __init__(
        self,
        config: MistralLarge4Config,
        core: AttentionCore,
        ctx: ParallelContext,
        number: int,
        choices: Choices,
        *,
        remakes_heads: bool = False,
    ) -> None:
        self.source, self.lends = config.kv_source_of(number), config.lends_latents(number)
        super().__init__(config.of_layer(number), core, ctx, number, choices, remakes_heads=remakes_heads)
        self.query_factors = QueryFactors(config.num_attention_heads, ctx, sharded=True)
        if self.lends:
            choices.holders[number] = self
        if not self.owns_latents:
            del self.linear_kv_down_proj, self.kv_layernorm

    @property
    def owns_latents(self) -> bool:
        return self.source == self.number

    def build_indexer(self, config: MistralLarge4Config, ctx: ParallelContext) -> Indexer:  # type: ignore[override]
        return HiddenStateIndexer(config, ctx, rotates=self.rotated > 0)

    def queries(self, source: Tensor, angles: RotaryAngles) -> Tensor:
        return self.query_factors(super().queries(source, angles), angles.position_ids)

    def rotate(self, x: Tensor, angles: RotaryAngles) -> Tensor:
        return super().rotate(x, angles) if self.rotated else x

    # -- latents ---------------------------------------------------------------------------------------

    def latents(self, x: Tensor, angles: RotaryAngles) -> tuple[Tensor, Tensor]:
        shared = self.choices.of_pass(angles).latents
        if not self.owns_latents:
            return shared[self.source]
        latents = super().latents(x, angles) if self.rotated else self._plain_latents(x)
        if self.lends:
            shared[self.number] = latents
        return latents

    def _plain_latents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same where no key has positional channels, of which nothing is sent between ranks."""
        latents = self.kv_layernorm(self.linear_kv_down_proj(x))
        return latents, latents.new_empty((x.shape[0], self._length(x), 1, 0))

    @property
    def holder(self) -> LatentAttention:
        # A layer that shares latents writes the new ones of its source again, to the same places.
        return self if self.owns_latents else self.choices.holders[self.source]

    def paged(self, pages: Pages, q: Tensor, latents: Tensor, positional: Tensor) -> Tensor:
        if self.rotated:
            return super().paged(pages, q, latents, positional)
        values = latents.unsqueeze(1)
        queries = self._absorbed_queries(q)[:1]
        return self._expanded_values(pages.attend(queries, (values,), values, PagedScores(self.plain**-0.5)))
