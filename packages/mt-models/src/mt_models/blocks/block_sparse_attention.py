"""Self-attention over the blocks of keys that an indexer chooses (MiniMax-M3, 2026)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.attention_backends.patterns import PerPattern
from mt_core.nn.cache import Cache, Pages
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.attention import AttentionConfigLike, SelfAttention
from mt_models.blocks.block_indexer import BlockIndexer, BlockIndexerConfigLike
from mt_models.blocks.key_blocks import KeyBlocks, key_blocks
from mt_models.blocks.rotary import RotaryAngles

BlocksOfPass = PerPattern[KeyBlocks]
"""The blocks of keys of a forward pass, which all layers share: one object of a model."""


class BlockSparseConfigLike(AttentionConfigLike, BlockIndexerConfigLike, Protocol):
    """What block-sparse attention reads from the configuration of its model."""


@dataclass
class BlockSparsePattern(AttentionPattern):
    """A pattern narrowed to chosen blocks, which its bias says to cores that know nothing of blocks. chosen
    [B, S, H, topk] int32, -1 for none: head h of the H chooses for the N / H query heads from h N / H on."""

    blocks: KeyBlocks | None = None
    chosen: Tensor | None = None


def narrowed(pattern: AttentionPattern, blocks: KeyBlocks, chosen: Tensor, heads: int) -> BlockSparsePattern:
    """The pattern of causal attention within documents, narrowed to chosen blocks. heads: N of this rank."""
    # Not a method of the pattern: a cycle of references would keep the choice of each layer until it is collected.
    bias = partial(block_bias, blocks, chosen, heads)
    return BlockSparsePattern(segment_ids=pattern.segment_ids, bias=bias, blocks=blocks, chosen=chosen)


def block_bias(blocks: KeyBlocks, chosen: Tensor, heads: int, queries: int, keys: int) -> Tensor:
    """[B, N, S, T] in bf16, which every dtype holds: 0 for keys in chosen blocks, -inf for others."""
    # -1 is put in a column of its own, behind all blocks.
    columns = chosen.long().where(chosen >= 0, blocks.count)
    left_out = torch.full(
        (*columns.shape[:3], blocks.count + 1), -torch.inf, dtype=torch.bfloat16, device=chosen.device
    )
    left_out.scatter_(-1, columns, 0.0)
    of_key = blocks.of_key[:, None, None].expand(*columns.shape[:3], -1)
    bias = left_out.gather(-1, of_key.expand(len(columns), -1, -1, -1)).transpose(1, 2)  # [B, H, S, T]
    return bias.repeat_interleave(heads // bias.shape[1], 1)


class BlockSparseAttention(SelfAttention):
    """x -> linear_proj(attention over chosen blocks): [B, S, hidden] -> the same. of_pass: that of the model."""

    def __init__(
        self, config: BlockSparseConfigLike, core: AttentionCore, ctx: ParallelContext, of_pass: BlocksOfPass
    ) -> None:
        super().__init__(config, core, ctx)
        self.indexer = BlockIndexer(config, ctx)
        self.selection, self.of_pass = config.block_selection, of_pass
        self.local_heads = config.num_attention_heads // ctx.tp.size

    def forward(self, x: Tensor, pattern: AttentionPattern, angles: RotaryAngles | None, cache: Cache | None) -> Tensor:
        assert angles is not None
        q, k, v = self.project_and_rotate(x, angles)
        if cache is not None:
            chosen = self.indexer.choose_cached(x, angles, cache)
            return self.linear_proj(self._attend_cached(q, chosen, k, v, pattern, cache).flatten(2))
        return self.linear_proj(self.attend(q, k, v, self._sparse(x, k.shape[1], pattern, angles)).flatten(2))

    def _sparse(self, x: Tensor, keys: int, pattern: AttentionPattern, angles: RotaryAngles) -> AttentionPattern:
        """The pattern of whole sequences of so many keys; the given one where no block is left out."""
        if self.selection.keeps_all(keys):
            return pattern
        blocks = self.of_pass.get(
            pattern, keys, lambda: key_blocks(keys, self.selection.size, pattern.segment_ids, x.device)
        )
        return narrowed(pattern, blocks, self.indexer.choose(x, angles, blocks), self.local_heads)

    # -- a cache -------------------------------------------------------------------------------------

    def _attend_cached(
        self, q: Tensor, chosen: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, cache: Cache
    ) -> Tensor:
        def attend(q: Tensor, chosen: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys = k.shape[1]
            if self.selection.keeps_all(keys):
                return self.attend(q, k, v, pattern)
            if q.shape[1] == 1 and not cache.is_batch_invariant:
                # One query reads the keys of its own blocks alone, whatever the length of the sequence.
                rows = self._rows(chosen[0])  # [1, U, K]
                seen = (rows >= 0) & (rows < keys)
                rows = rows.clamp(0, keys - 1)[0]
                own_k, own_v = (values[0][rows, self._groups(rows)][None] for values in (k, v))
                return self._attend_rows(q[0], own_k, own_v, seen)[None]
            blocks = key_blocks(keys, self.selection.size, None, q.device)
            return self.attend(q, k, v, narrowed(pattern, blocks, chosen, self.local_heads))

        def paged(pages: Pages, q: Tensor, chosen: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if self.selection.keeps_all(pages.room):
                return pages.attend((q,), (k,), v, self.paged_scores(pattern))
            rows = self._rows(chosen[0])  # [B, U, K], of static size
            seen = (rows >= 0) & (rows <= pages.last[:, None, None])
            places = pages.places(rows.clamp(0, pages.room - 1).flatten(1)).unflatten(1, rows.shape[1:])
            groups = self._groups(places)
            return self._attend_rows(q[0], k[places, groups], v[places, groups], seen)[None]

        return cache.attend(self, attend, (q, chosen), (k, v), paged)

    @property
    def _local_groups(self) -> int:
        return max(self.query_groups // self.tp.size, 1)

    def _rows(self, chosen: Tensor) -> Tensor:
        """[B, H, topk] -> [B, U, K] int64: positions of the keys in the chosen blocks, negative for none. U: the groups
        of keys or the heads of the indexer, whichever are more."""
        size = self.selection.size
        rows = chosen.long()[..., None] * size + torch.arange(size, device=chosen.device)
        rows = rows.flatten(2)
        return rows.repeat_interleave(max(self._local_groups // rows.shape[1], 1), 1)

    def _groups(self, rows: Tensor) -> Tensor:
        """[..., U, K] -> [U, 1]: the group of keys of each of U."""
        units = rows.shape[-2]
        return (torch.arange(units, device=rows.device) * self._local_groups // units)[:, None]

    def _attend_rows(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """q [B, N, D] over k and v [B, U, K, D], of which seen [B, U, K] -> [B, N, D]"""
        queries = q.unflatten(1, (k.shape[1], -1))  # [B, U, N / U, D]
        scores = (queries @ k.mT).float() * self.head_dim**-0.5
        scores = scores.masked_fill(~seen.unsqueeze(2), float("-inf"))
        return (scores.softmax(-1).to(v.dtype) @ v).flatten(1, 2)
