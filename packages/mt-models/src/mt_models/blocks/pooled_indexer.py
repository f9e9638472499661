"""Lightning indexer over pools of keys (GLM-5.3-Flash, 2026): which positions a query attends to.

Each run of P positions of a document is a pool. For the input x of attention, channel by channel, with a softmax over
the positions i of a pool:

    k_s = norm(W_k x_s)  [D]      pooled = sum over i of softmax_i(W_g x_i + b_i) k_i
    I_tp = sum over heads h of w_th relu(q_th . pooled_p / sqrt(D))

with q and w as in `mt_models.blocks.indexer`, without rotary positions. A query chooses the topk / P complete pools
with the highest I of those whose last position it sees, and sees all of their positions; beside them those behind the
last complete pool, its own among them. No gradient passes the choice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.cache import Cache, Pages, PositionState
from mt_core.nn.layout import LayoutModule, ParameterLayout, normal, sequence_axes, zeros
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.nn.norm import build_norm
from mt_core.parallel.collectives import all_gather
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.compressor import Runs, places_in_documents, runs_of
from mt_models.blocks.indexer import UsesScores, chosen_keys
from mt_models.blocks.linear import ReplicatedLinear, effective_weight

NONE = -1
"""In a choice: no position. A query with few complete pools, or a short tail, has some."""


class PooledIndexerConfigLike(Protocol):
    """What an indexer reads from the configuration of its model."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def q_lora_rank(self) -> int | None: ...
    @property
    def init_method_std(self) -> float: ...
    @property
    def dsa_indexer_n_heads(self) -> int: ...
    @property
    def dsa_indexer_head_dim(self) -> int: ...
    @property
    def dsa_indexer_topk(self) -> int: ...
    @property
    def dsa_indexer_pool_size(self) -> int: ...
    @property
    def dsa_indexer_k_norm_epsilon(self) -> float: ...


class PooledInputs(NamedTuple):
    queries: Tensor
    """[B, S, H, D]"""
    weights: Tensor
    """[B, S, H] in fp32"""
    keys: Tensor
    """[B, S, D]"""
    gates: Tensor
    """[B, S, D]"""


class PooledIndexer(UsesScores, LayoutModule):
    """Chooses positions. linear_gate [D, hidden] and position_bias [P, D] weigh the keys of a pool; the bias is fp32.
    Under sequence parallelism each rank chooses for its own positions."""

    position_bias: Tensor

    def __init__(self, config: PooledIndexerConfigLike, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        assert config.q_lora_rank is not None  # required by the configuration of the family
        self.ctx, self.topk, self.pool = ctx, config.dsa_indexer_topk, config.dsa_indexer_pool_size
        self.heads, self.size = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        init = normal(config.init_method_std)

        def linear(inputs: int, outputs: int) -> ReplicatedLinear:
            return ReplicatedLinear(inputs, outputs, ctx, init=init, bias=False, on_sequence=True)

        self.linear_wq_b = linear(config.q_lora_rank, self.heads * self.size)
        self.linear_wk = linear(config.hidden_size, self.size)
        self.k_norm = build_norm("LayerNorm", self.size, config.dsa_indexer_k_norm_epsilon, ctx)
        self.linear_weights_proj = linear(config.hidden_size, self.heads)
        self.linear_gate = linear(config.hidden_size, self.size)
        partial = sequence_axes(ctx)
        self.declare(
            "position_bias",
            ParameterLayout((self.pool, self.size), zeros, partial_gradient=partial, dtype=torch.float32),
        )

    def project(self, x: Tensor, source: Tensor) -> PooledInputs:
        """x [B, S, hidden], the input of attention; source [B, S, C], the normalized latent of its queries."""
        weights = F.linear(x.float(), effective_weight(self.linear_weights_proj).float()) * self.heads**-0.5
        queries = self.linear_wq_b(source).unflatten(-1, (self.heads, self.size))
        return PooledInputs(queries, weights, self.k_norm(self.linear_wk(x)), self.linear_gate(x))

    def pooled(self, keys: Tensor, gates: Tensor, runs: Runs) -> Tensor:
        """keys, gates [B, T, D] of all positions -> [B, P, D]; those of runs that do not exist are not looked at."""
        batch = torch.arange(keys.shape[0], device=keys.device)[:, None, None]
        places = positions_of(runs).expand(keys.shape[0], -1, -1)
        weights = (gates[batch, places].float() + self.position_bias.float()).softmax(2).to(keys.dtype)
        return (weights * keys[batch, places]).sum(2)

    def choose(self, inputs: PooledInputs, segment_ids: Tensor | None) -> Tensor:
        """[B, S, topk + P - 1] int64 of all positions, of which a query sees those that are not NONE. inputs: of this
        rank's positions; their number in all has to be above topk."""
        queries, weights, keys, gates = inputs
        ctx, first = self.ctx, 0
        if ctx.sequence_parallel:
            keys, gates = (all_gather(x, SEQUENCE_DIM, ctx.tp) for x in (keys, gates))
            first = ctx.tp.rank * queries.shape[SEQUENCE_DIM]
        runs = runs_of(keys.shape[1], self.pool, segment_ids, keys.device)
        scores = self.score(queries, weights, self.pooled(keys, gates, runs))
        local_range = slice(first, first + queries.shape[1])
        visible = runs.visible(segment_ids, keys.shape[1])[:, local_range]
        positions = torch.arange(local_range.start, local_range.stop, device=keys.device)[None]
        places = positions if segment_ids is None else places_in_documents(segment_ids)[:, local_range]
        chosen = self._positions(scores, visible, runs, positions, places)
        return all_gather(chosen, SEQUENCE_DIM, ctx.tp) if ctx.sequence_parallel else chosen

    def choose_cached(self, inputs: PooledInputs, cache: Cache) -> Tensor:
        """[1, S, topk + P - 1] of the new positions S in the cache; of no meaning for sequences of at most topk."""

        def choose(queries: Tensor, weights: Tensor, keys: Tensor, gates: Tensor) -> Tensor:
            count, length = queries.shape[1], keys.shape[1]
            if length <= self.topk:
                return self._nothing(queries)
            positions = torch.arange(length - count, length, device=keys.device)[None]
            return self._choose_of(queries, weights, keys, gates, positions)

        if self.ctx.sequence_parallel:
            inputs = PooledInputs(*(all_gather(x, SEQUENCE_DIM, self.ctx.tp) for x in inputs))
        queries, weights, keys, gates = inputs
        return cache.attend(self, choose, (queries, weights), (keys, gates), self._choose_paged)

    def _choose_paged(self, pages: Pages, queries: Tensor, weights: Tensor, keys: Tensor, gates: Tensor) -> Tensor:
        """[1, B, H, D], [1, B, H], [places, D] twice -> [1, B, topk + P - 1]: for the new position of each of B
        sequences."""
        if pages.room <= self.topk:
            return self._nothing(queries)
        every = torch.arange(pages.room, device=keys.device)[None]
        # Shapes are static: keys of all positions that there is room for.
        places = pages.places(every.expand(queries.shape[1], -1))
        chosen = self._choose_of(
            queries.transpose(0, 1), weights.transpose(0, 1), keys[places], gates[places], pages.last[:, None]
        )
        return chosen.transpose(0, 1)

    def _choose_of(self, queries: Tensor, weights: Tensor, keys: Tensor, gates: Tensor, positions: Tensor) -> Tensor:
        """Queries at positions [B or 1, S] of sequences that are one document."""
        runs = runs_of(keys.shape[1], self.pool, None, keys.device)
        scores = self.score(queries, weights, self.pooled(keys, gates, runs))
        visible = runs.ends[:, None, :] <= positions[..., None]
        return self._positions(scores, visible, runs, positions, positions)

    def _nothing(self, queries: Tensor) -> Tensor:
        return queries.new_full((1, queries.shape[1], self.topk + self.pool - 1), NONE, dtype=torch.int64)

    def _positions(self, scores: Tensor, visible: Tensor, runs: Runs, positions: Tensor, places: Tensor) -> Tensor:
        """scores [B, S, P], visible [B or 1, S, P], positions of the queries in the sequence and in their documents
        [B or 1, S] -> [B, S, topk + pool - 1]"""
        chosen = chosen_keys(scores, visible, self.topk // self.pool)  # [B, S, topk / pool]
        batch = torch.arange(scores.shape[0], device=scores.device)[:, None, None]
        within = positions_of(runs).expand(scores.shape[0], -1, -1)[batch, chosen]
        is_seen = visible.expand_as(scores).gather(-1, chosen)
        of_pools = within.masked_fill(~is_seen[..., None], NONE).flatten(2)
        # The positions of an incomplete pool up to the query's own.
        back = torch.arange(self.pool - 1, device=scores.device)
        tail = (positions[..., None] - back).masked_fill(back >= ((places + 1) % self.pool)[..., None], NONE)
        return torch.cat((of_pools, tail.expand(*scores.shape[:2], -1)), -1)

    def cached_state(self) -> PositionState:
        """The one key for all heads, and its gate."""
        return PositionState(((self.size,), (self.size,)), self.linear_wk.weight.dtype, is_paged=True)


def positions_of(runs: Runs) -> Tensor:
    """[B or 1, P, ratio]: the positions of each run."""
    back = torch.arange(runs.ratio - 1, -1, -1, device=runs.ends.device)
    # Of runs that do not exist some would be before the first position.
    return (runs.ends[..., None] - back).clamp_min(0)


def chosen_pattern(pattern: AttentionPattern, chosen: Tensor, keys: int, dtype: torch.dtype) -> AttentionPattern:
    """The pattern in which a query sees of so many keys those among chosen [B, S, K] alone, of which some are NONE."""
    # One more column takes what is NONE.
    among = torch.zeros((*chosen.shape[:-1], keys + 1), dtype=torch.bool, device=chosen.device)
    among = among.scatter_(-1, chosen.where(chosen >= 0, keys), True)[..., :keys]
    bias = torch.zeros(among.shape, dtype=dtype, device=chosen.device)
    bias = bias.masked_fill_(~among, float("-inf")).unsqueeze(1)
    return replace(pattern, bias=bias, _mask=None, _within={})
