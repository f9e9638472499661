"""Indexer of block-sparse attention (MiniMax-M3, 2026): which blocks of keys a query attends to.

    q_h = rotate(norm(W_q,h x))  [D], one head for each group of query heads      k = rotate(norm(W_k x))  [D], for all

with norms that multiply by 1 + weight. `key_blocks` has the scores and the choice. No gradient passes the choice, and
the indexer has no other effect, so that its parameters are not trained. It is the same on every tensor-parallel rank,
which chooses for its own heads, or under sequence parallelism for its own positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from mt_core.nn.cache import Cache, Pages, PositionState
from mt_core.nn.layout import normal
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.parallel.collectives import all_gather
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.key_blocks import KeyBlocks, Selection, choose_blocks, key_blocks
from mt_models.blocks.linear import ReplicatedLinear
from mt_models.blocks.norm import ZeroCenteredRMSNorm
from mt_models.blocks.rotary import RotaryAngles, rotate


class BlockIndexerConfigLike(Protocol):
    """What the indexer reads from the configuration of its model."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def norm_epsilon(self) -> float: ...
    @property
    def init_method_std(self) -> float: ...
    @property
    def rotary_interleaved(self) -> bool: ...
    @property
    def index_heads(self) -> int: ...
    @property
    def sparse_index_dim(self) -> int: ...
    @property
    def block_selection(self) -> Selection: ...


@dataclass(frozen=True)
class OwnHeads:
    """Heads of the indexer that choose for the query heads of this rank."""

    first: int
    count: int

    def of(self, values: Tensor) -> Tensor:
        """[B, S, heads, ...] -> [B, S, count, ...]"""
        return values.narrow(2, self.first, self.count)


def own_heads(heads: int, query_heads: int, ctx: ParallelContext) -> OwnHeads:
    """heads: of the indexer, each of which chooses for query_heads / heads query heads of the whole model."""
    first = ctx.tp.rank * (query_heads // ctx.tp.size)
    return OwnHeads(first // (query_heads // heads), max(heads // ctx.tp.size, 1))


class BlockIndexer(nn.Module):
    """Chooses blocks of keys: [B, S, heads of this rank, topk] int32, -1 where a query sees fewer blocks."""

    def __init__(self, config: BlockIndexerConfigLike, ctx: ParallelContext) -> None:
        super().__init__()
        self.ctx, self.selection = ctx, config.block_selection
        self.heads, self.size = config.index_heads, config.sparse_index_dim
        self.interleaved = config.rotary_interleaved
        self.own = own_heads(config.index_heads, config.num_attention_heads, ctx)
        init = normal(config.init_method_std)
        self.linear_q = ReplicatedLinear(
            config.hidden_size, self.heads * self.size, ctx, init=init, bias=False, on_sequence=True
        )
        self.linear_k = ReplicatedLinear(config.hidden_size, self.size, ctx, init=init, bias=False, on_sequence=True)
        self.q_layernorm = ZeroCenteredRMSNorm(self.size, config.norm_epsilon, ctx)
        self.k_layernorm = ZeroCenteredRMSNorm(self.size, config.norm_epsilon, ctx)

    def choose(self, x: Tensor, angles: RotaryAngles, blocks: KeyBlocks) -> Tensor:
        """x [B, S, hidden] of whole sequences, the input of attention."""
        with torch.no_grad():
            queries, keys = self._project(x, angles)
            first = self.ctx.tp.rank * x.shape[SEQUENCE_DIM] if self.ctx.sequence_parallel else 0
            positions = torch.arange(first, first + x.shape[SEQUENCE_DIM], device=x.device)[None]
            chosen = choose_blocks(queries, keys, positions, blocks, self.selection)
            return self.own.of(all_gather(chosen, SEQUENCE_DIM, self.ctx.tp)) if self.ctx.sequence_parallel else chosen

    def _project(self, x: Tensor, angles: RotaryAngles) -> tuple[Tensor, Tensor]:
        """Queries [B, S, H, D] and keys [B, T, D]. Under sequence parallelism S are this rank's positions and H all
        heads; otherwise S are all positions and H the heads of this rank."""
        cos, sin = self._own_positions(angles.cos), self._own_positions(angles.sin)
        queries = self.linear_q(x).unflatten(-1, (self.heads, self.size))
        if not self.ctx.sequence_parallel:
            queries = self.own.of(queries)
        queries = rotate(self.q_layernorm(queries), cos, sin, self.interleaved)
        keys = rotate(self.k_layernorm(self.linear_k(x)).unsqueeze(2), cos, sin, self.interleaved).squeeze(2)
        return queries, all_gather(keys, SEQUENCE_DIM, self.ctx.tp) if self.ctx.sequence_parallel else keys

    def _own_positions(self, values: Tensor) -> Tensor:
        """[B, S, ...] of all positions -> of this rank's, under sequence parallelism."""
        tp = self.ctx.tp
        return values.chunk(tp.size, SEQUENCE_DIM)[tp.rank] if self.ctx.sequence_parallel else values

    # -- a cache -------------------------------------------------------------------------------------

    def choose_cached(self, x: Tensor, angles: RotaryAngles, cache: Cache) -> Tensor:
        """[1, S, heads of this rank, topk] of the new positions S in the cache; of a sequence of which no block is left
        out, anything."""
        queries, keys = self._project(x, angles)
        if self.ctx.sequence_parallel:
            queries = self.own.of(all_gather(queries, SEQUENCE_DIM, self.ctx.tp))

        def choose(queries: Tensor, keys: Tensor) -> Tensor:
            count, length = queries.shape[1], keys.shape[1]
            if self.selection.keeps_all(length):
                return queries.new_zeros((*queries.shape[:3], self.selection.topk), dtype=torch.int32)
            positions = torch.arange(length - count, length, device=keys.device)[None]
            blocks = key_blocks(length, self.selection.size, None, keys.device)
            return choose_blocks(queries, keys, positions, blocks, self.selection)

        return cache.attend(self, choose, (queries,), (keys,), self._choose_paged)

    def _choose_paged(self, pages: Pages, queries: Tensor, keys: Tensor) -> Tensor:
        """[1, B, H, D], [places, D] -> [1, B, H, topk]: for the new position of each of B sequences."""
        count = queries.shape[1]
        if self.selection.keeps_all(pages.room):
            return queries.new_zeros((1, count, queries.shape[2], self.selection.topk), dtype=torch.int32)
        positions = torch.arange(pages.room, device=keys.device)[None].expand(count, -1)
        # Shapes are static: keys of all positions that there is room for, of which those behind the last are not seen.
        sequence_keys = keys[pages.places(positions)]  # [B, T, D]
        blocks = key_blocks(pages.room, self.selection.size, None, keys.device)
        chosen = choose_blocks(queries.transpose(0, 1), sequence_keys, pages.last[:, None], blocks, self.selection)
        return chosen.transpose(0, 1)

    def cached_state(self) -> PositionState:
        """The one key for all heads."""
        return PositionState(((self.size,),), self.linear_k.weight.dtype, is_paged=True)
