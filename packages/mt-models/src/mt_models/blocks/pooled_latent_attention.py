"""Multi-head latent attention without positions, over the pools of keys that an indexer chooses (GLM-5.3-Flash)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.cache import Cache, Pages
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.latent_attention import LatentAttentionConfigLike, UnrotatedLatentAttention
from mt_models.blocks.pooled_indexer import PooledIndexer, PooledIndexerConfigLike, chosen_pattern
from mt_models.blocks.rotary import RotaryAngles


class PooledAttentionConfigLike(LatentAttentionConfigLike, PooledIndexerConfigLike, Protocol):
    """What this attention reads from the configuration of its model."""


class PooledLatentAttention(UnrotatedLatentAttention):
    """x -> linear_proj(attention over chosen positions): [B, S, hidden] -> the same."""

    def __init__(
        self,
        config: PooledAttentionConfigLike,
        core: AttentionCore,
        ctx: ParallelContext,
        *,
        remakes_heads: bool = False,
    ) -> None:
        super().__init__(config, core, ctx, remakes_heads=remakes_heads)
        self.topk = config.dsa_indexer_topk
        self.indexer = PooledIndexer(config, ctx)

    def forward(self, x: Tensor, pattern: AttentionPattern, angles: RotaryAngles | None, cache: Cache | None) -> Tensor:
        assert angles is not None
        source = self.query_source(x)
        latents, positional = self.latents(x, angles)
        if cache is not None:
            chosen = self.indexer.choose_cached(self.indexer.project(x, source), cache)
            q, latents = self.queries(source, angles), self.of_all_positions(latents)
            return self.output(self._attend_cached(q, chosen, latents, positional, pattern, cache), x)
        sparse = self._sparse_pattern(x, source, pattern)
        return self.output(self.over_sequence(source, latents, positional, sparse, angles), x)

    @torch.no_grad()
    def _sparse_pattern(self, x: Tensor, source: Tensor, pattern: AttentionPattern) -> AttentionPattern:
        length = x.shape[SEQUENCE_DIM] * (self.ctx.tp.size if self.ctx.sequence_parallel else 1)
        if length <= self.topk:
            return pattern
        chosen = self.indexer.choose(self.indexer.project(x, source), pattern.segment_ids)
        return chosen_pattern(pattern, chosen, length, x.dtype)

    # -- a cache -------------------------------------------------------------------------------------

    def _attend_cached(
        self, q: Tensor, chosen: Tensor, latents: Tensor, positional: Tensor, pattern: AttentionPattern, cache: Cache
    ) -> Tensor:
        def attend(q: Tensor, chosen: Tensor, latents: Tensor, positional: Tensor) -> Tensor:
            keys = latents.shape[1]
            if keys <= self.topk:
                return self.attend_to_latents(q, latents, positional, pattern, cache)
            if q.shape[1] == 1:
                # One query reads its own keys alone, whatever the length of the sequence. It is the last position.
                rows = chosen[0, 0]
                rows = rows[rows >= 0]
                return self.absorbed(q, latents[:, rows], positional[:, rows], pattern)
            sparse = chosen_pattern(pattern, chosen, keys, q.dtype)
            return self.attend_to_latents(q, latents, positional, sparse, cache)

        return cache.attend(self, attend, (q, chosen), (latents, positional), self._attend_paged)

    def _attend_paged(self, pages: Pages, q: Tensor, chosen: Tensor, latents: Tensor, positional: Tensor) -> Tensor:
        """q [1, B, N, plain], chosen [1, B, K], latents [places, C] of the whole cache -> [1, B, N, value]: the new
        position of each sequence over its own choice, of static size."""
        if pages.room <= self.topk:
            return self.paged(pages, q, latents, positional)
        rows = chosen[0]  # [B, K]
        chosen_latents = latents[pages.places(rows.clamp_min(0))]  # [B, K, C]
        plain = self._absorbed_queries(q)[0][0]  # [B, N, C]
        scores = (plain @ chosen_latents.mT).float() * (self.plain + self.rotated) ** -0.5
        scores = scores.masked_fill((rows < 0).unsqueeze(1), float("-inf"))
        return self._expanded_values((scores.softmax(-1).to(chosen_latents.dtype) @ chosen_latents)[None])
