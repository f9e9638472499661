"""Gated attention over runs of keys that an indexer chooses (QSA, Qwen4-Exp, 2026).

The positions before a query, from the beginning of its document, are runs of `ratio`. For a position t with the input x
of attention, and a complete run r whose first position is s:

    q_h = rotate_t(norm(W_q,h x_t))  [D]      k_r = rotate_s(norm(mean over the run of W_k x))  [D], one for all heads
    I_tr = sum over heads h of relu(q_th . k_r) / sqrt(D)

A query attends to the keys of the budget / ratio runs with the highest I_tr, and to those of the run that it is in. The
norms multiply by 1 + weight. No gradient passes the choice. The indexer is the same on every tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.cache import Cache, PositionState
from mt_core.nn.layout import normal
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.parallel.collectives import all_gather
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.attention import AttentionConfigLike
from mt_models.blocks.compressor import Runs, runs_of
from mt_models.blocks.gated_attention import GatedSelfAttention
from mt_models.blocks.indexer import PRODUCTS_AT_ONCE, among, chosen_keys
from mt_models.blocks.linear import ReplicatedLinear
from mt_models.blocks.norm import ZeroCenteredRMSNorm
from mt_models.blocks.rotary import RotaryAngles, rotate


class RunSparseConfigLike(AttentionConfigLike, Protocol):
    """What the attention reads from the configuration of its model."""

    @property
    def qsa_indexer_n_heads(self) -> int: ...
    @property
    def qsa_indexer_head_dim(self) -> int: ...
    @property
    def qsa_budget(self) -> int: ...
    @property
    def qsa_compress_ratio(self) -> int: ...


class RunIndexer(nn.Module):
    """Chooses runs of keys."""

    def __init__(self, config: RunSparseConfigLike, ctx: ParallelContext) -> None:
        super().__init__()
        self.ctx, self.heads, self.size = ctx, config.qsa_indexer_n_heads, config.qsa_indexer_head_dim
        self.ratio, self.topk = config.qsa_compress_ratio, config.qsa_budget // config.qsa_compress_ratio
        rows, init = (self.heads + 1) * self.size, normal(config.init_method_std)
        self.linear_qk = ReplicatedLinear(config.hidden_size, rows, ctx, init=init, bias=False, on_sequence=True)
        self.q_layernorm = ZeroCenteredRMSNorm(self.size, config.norm_epsilon, ctx)
        self.k_layernorm = ZeroCenteredRMSNorm(self.size, config.norm_epsilon, ctx)

    def chooses(self, length: int) -> bool:
        """Whether a sequence of this length has runs that are left out."""
        return length // self.ratio > self.topk

    def project(self, x: Tensor, angles: RotaryAngles) -> tuple[Tensor, Tensor]:
        """x [B, S, hidden], the input of attention, of this rank's positions -> queries [B, S, H, D] and keys
        [B, S, D] of all, the keys as they are before the mean."""
        rows = self.linear_qk(x)
        if self.ctx.sequence_parallel:
            rows = all_gather(rows, SEQUENCE_DIM, self.ctx.tp)
        queries, keys = rows.split((self.heads * self.size, self.size), -1)
        normed = self.q_layernorm(queries.unflatten(-1, (self.heads, self.size)))
        return rotate(normed, angles.cos, angles.sin, interleaved=False), keys

    def choose(self, queries: Tensor, keys: Tensor, runs: Runs, visible: Tensor, angles: RotaryAngles) -> Tensor:
        """[B, S, topk] int64: the numbers of runs. keys [B, K, D] of all positions, angles of all positions, visible
        [B or 1, S, T] bool: the runs that a query sees. A query that sees fewer chooses some that it does not see."""
        inside = runs.ends[..., None] + torch.arange(1 - self.ratio, 1, device=keys.device)  # [B or 1, T, ratio]
        pooled = _of_batch(keys, inside).float().mean(2).to(keys.dtype)
        # [B or 1, S, R] at the first position of each run
        cos, sin = (_of_batch(part.squeeze(2), inside[..., :1]) for part in (angles.cos, angles.sin))
        entries = rotate(self.k_layernorm(pooled).unsqueeze(2), cos, sin, interleaved=False).squeeze(2)
        rows = max(PRODUCTS_AT_ONCE // (queries.shape[0] * self.heads * max(entries.shape[1], 1)), 1)
        parts = zip(queries.split(rows, 1), visible.split(rows, 1), strict=True)
        return torch.cat([chosen_keys(run_scores(q, entries), seen, self.topk) for q, seen in parts], 1)

    def cached_state(self) -> PositionState:
        """The key of each position, before the mean over its run."""
        return PositionState(((self.size,),), self.linear_qk.weight.dtype)


def run_scores(queries: Tensor, entries: Tensor) -> Tensor:
    """queries [B, S, H, D], entries [B, T, D] -> [B, S, T] in fp32"""
    products = queries.float() @ entries.float().transpose(-1, -2).unsqueeze(1)  # [B, S, H, T]
    return F.relu(products).sum(2) * queries.shape[-1] ** -0.5


def _of_batch(x: Tensor, index: Tensor) -> Tensor:
    """x [B or 1, S, C], index [B or 1, T, R] -> [B or 1, T, R, C]"""
    if index.shape[0] == 1:
        return x[:, index[0]]
    batch = torch.arange(index.shape[0], device=x.device)[:, None, None]
    return x.expand(index.shape[0], -1, -1)[batch, index]


def left_out(chosen: Tensor, runs: Runs, length: int) -> Tensor:
    """chosen [B, S, topk] runs of S queries, the last of `length` positions -> [B, S, length] bool: the keys of
    complete runs that a query has not chosen."""
    count, device = runs.ends.shape[1], chosen.device
    positions = torch.arange(length - chosen.shape[1], length, device=device)
    # A run is complete for a query from the run's last position on; one more run has the positions of none.
    complete = (runs.ends[:, None, :] <= positions[None, :, None]) & runs.exist[:, None, :]
    skipped = F.pad(complete & ~among(chosen, count), (0, 1))
    return skipped.gather(-1, _run_of_positions(runs, length).unsqueeze(1).expand(*chosen.shape[:2], -1))


def _run_of_positions(runs: Runs, length: int) -> Tensor:
    """[B or 1, length] int64: the number of the complete run of each position, or the number of runs."""
    batch, count = runs.ends.shape
    inside = runs.ends[..., None] + torch.arange(1 - runs.ratio, 1, device=runs.ends.device)
    # What does not exist is written behind the end.
    inside = torch.where(runs.exist[..., None], inside, length).flatten(1)
    numbers = torch.arange(count, device=inside.device).repeat_interleave(runs.ratio).expand(batch, -1)
    return torch.full((batch, length + 1), count, device=inside.device).scatter_(1, inside, numbers)[:, :length]


class RunSparseAttention(GatedSelfAttention):
    """x -> linear_proj(attention over chosen runs * sigmoid(gate)): [B, S, hidden] -> the same."""

    def __init__(self, config: RunSparseConfigLike, core: AttentionCore, ctx: ParallelContext) -> None:
        norm = partial(ZeroCenteredRMSNorm, config.head_dim, config.norm_epsilon, ctx, per_head=True)
        super().__init__(config, core, ctx, head_norm=norm)
        self.indexer = RunIndexer(config, ctx)

    def forward(self, x: Tensor, pattern: AttentionPattern, angles: RotaryAngles | None, cache: Cache | None) -> Tensor:
        assert angles is not None
        q, gate, k, v = self.project_with_gate(x)
        q, k = self.normalize(q, k)
        q, k = self.apply_rotary(q, k, angles.cos, angles.sin, self.rotary_interleaved)
        if cache is None:
            out = self.attend(q, k, v, self._sparse(x, pattern, angles, q.shape[1]))
        else:
            out = self._cached(x, q, k, v, pattern, angles, cache)
        return self.linear_proj((out * torch.sigmoid(gate)).flatten(2))

    @torch.no_grad()
    def _sparse(self, x: Tensor, pattern: AttentionPattern, angles: RotaryAngles, length: int) -> AttentionPattern:
        """The pattern without the keys of runs that are left out."""
        if not self.indexer.chooses(length):
            return pattern
        runs = runs_of(length, self.indexer.ratio, pattern.segment_ids, x.device)
        queries, keys = self.indexer.project(x, angles)
        chosen = self.indexer.choose(queries, keys, runs, runs.visible(pattern.segment_ids, length), angles)
        return without(pattern, left_out(chosen, runs, length), x.dtype)

    # -- a cache -------------------------------------------------------------------------------------

    def cached_state(self) -> PositionState:
        return replace(super().cached_state(), is_paged=False)

    def _cached(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles,
        cache: Cache,
    ) -> Tensor:
        indexer, ratio = self.indexer, self.indexer.ratio

        def runs_before(length: int) -> Runs:
            return runs_of(length, ratio, None, x.device)

        def choose(queries: Tensor, keys: Tensor) -> Tensor:
            length, count = keys.shape[1], queries.shape[1]
            if not indexer.chooses(length):
                return queries.new_zeros((1, count, indexer.topk), dtype=torch.int64)
            runs, everywhere = runs_before(length), angles.at(torch.arange(length, device=keys.device)[None])
            visible = runs.visible(None, length)[:, length - count :]
            return indexer.choose(queries, keys, runs, visible, everywhere)

        def attend(q: Tensor, chosen: Tensor, k: Tensor, v: Tensor) -> Tensor:
            length = k.shape[1]
            if not indexer.chooses(length):
                return self.attend(q, k, v, pattern)
            return self.attend(q, k, v, without(pattern, left_out(chosen, runs_before(length), length), q.dtype))

        queries, keys = indexer.project(x, angles)
        chosen = cache.attend(indexer, choose, (queries,), (keys,))
        return cache.attend(self, attend, (q, chosen), (k, v))


def without(pattern: AttentionPattern, hidden: Tensor, dtype: torch.dtype) -> AttentionPattern:
    """The pattern in which queries do not see the keys `hidden` [B, S, T] bool."""
    bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
    return replace(pattern, bias=bias.unsqueeze(1), _mask=None, _within={})
