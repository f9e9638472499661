"""Attention of DeepSeek-V4 (2026): one head of keys that are values too, a window, and compressed entries beyond it.

For a position p with the input x, N query heads of D channels and c = norm(W_qa x):

    q_n = rotate(W_qb,n c / rms)      k = rotate(norm(W_kv x)), the same for every head
    o_n = rotate(softmax([q_n . k_s / sqrt(D), q_n . e_j / sqrt(D), sink_n]) over [k_s, e_j], by -p)
    out = W_ob [W_oa,g o of the heads of group g, for each group]

over the positions s of the window and the entries e_j (`compressor`): all that p sees, or those that an indexer
chooses. Values are rotated keys, so that a value carries its position; the rotation of the output by -p makes that the
distance. A sink is a score without a value.

Nothing is computed for pairs outside of the window: queries are taken in blocks, whose scores backward computes again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.auxiliary import AuxiliaryLoss
from mt_core.nn.cache import Cache, Pages, PositionState
from mt_core.nn.dropout import AttentionDropout
from mt_core.nn.layout import LayoutModule, ParameterLayout, Split, normal, zeros
from mt_core.nn.linear import SEQUENCE_DIM, ColumnParallelLinear, RowParallelLinear
from mt_core.parallel.collectives import all_gather, all_reduce, copy_to, gather_from
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.compressor import (
    Compressor,
    CompressorConfigLike,
    Runs,
    rotate_last,
    runs_of,
    starts_of_sequences,
)
from mt_models.blocks.indexer import UsesScores, among, chosen_keys
from mt_models.blocks.indexer_loss import indexer_loss
from mt_models.blocks.linear import ReplicatedLinear, effective_weight
from mt_models.blocks.norm import Float32RMSNorm, ScaleFreeRMSNorm
from mt_models.blocks.rotary import RotaryAngles

QUERIES_AT_ONCE = 128
"""The smallest block of queries, and the number of keys before it that are multiplied beyond the window."""


class CompressedAttentionConfigLike(CompressorConfigLike, Protocol):
    """What attention reads from the configuration of its model."""

    @property
    def num_attention_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def qk_pos_emb_head_dim(self) -> int: ...
    @property
    def q_lora_rank(self) -> int: ...
    @property
    def o_groups(self) -> int: ...
    @property
    def o_lora_rank(self) -> int: ...
    @property
    def sliding_window(self) -> int: ...
    @property
    def attention_dropout(self) -> float: ...
    @property
    def output_init_std(self) -> float: ...
    @property
    def dsa_indexer_n_heads(self) -> int: ...
    @property
    def dsa_indexer_head_dim(self) -> int: ...
    @property
    def dsa_indexer_topk(self) -> int: ...
    @property
    def dsa_indexer_loss_coeff(self) -> float: ...
    @property
    def dsa_indexer_use_sparse_loss(self) -> bool: ...
    @property
    def dsa_dense_warmup(self) -> bool: ...
    def compression_of(self, layer: int) -> int: ...
    def is_indexed(self, layer: int) -> bool: ...


# -- the parts ---------------------------------------------------------------------------------------


class GroupedProjection(LayoutModule):
    """[B, S, heads, D] -> [B, S, groups * rank], for this rank's heads: a matrix for each group of heads.

    weight [groups * rank, heads * D / groups]; tensor-parallel ranks have whole groups.
    """

    weight: Tensor

    def __init__(self, config: CompressedAttentionConfigLike, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.groups = config.o_groups // ctx.tp.size
        width = config.num_attention_heads * config.head_dim // config.o_groups
        shape, split = (config.o_groups * config.o_lora_rank, width), Split(dim=0, axis="tp")
        self.declare("weight", ParameterLayout(shape, normal(config.init_method_std), (split,)))

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.flatten(2).unflatten(-1, (self.groups, -1)).flatten(0, 1).transpose(0, 1)  # [groups, B S, width]
        rows = grouped @ self.weight.unflatten(0, (self.groups, -1)).transpose(1, 2)
        return rows.transpose(0, 1).flatten(1).unflatten(0, x.shape[:2])


class Sinks(LayoutModule):
    """A score of each head without a value, in fp32."""

    softmax_offset: Tensor

    def __init__(self, heads: int, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        split = Split(dim=0, axis="tp")
        self.declare("softmax_offset", ParameterLayout((heads,), zeros, (split,), dtype=torch.float32))


@dataclass(frozen=True)
class IndexQueries:
    """queries [B, S, H, D] and weights [B, S, H], in fp32, of this rank's positions under sequence parallelism."""

    queries: Tensor
    weights: Tensor


class EntryIndexer(UsesScores, nn.Module):
    """Chooses entries, as `mt_models.blocks.indexer` chooses keys: its keys are entries of a compressor of its own."""

    def __init__(self, config: CompressedAttentionConfigLike, ratio: int, ctx: ParallelContext) -> None:
        super().__init__()
        self.ctx, self.heads, self.size = ctx, config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.rotated, init = config.qk_pos_emb_head_dim, normal(config.init_method_std)

        def linear(inputs: int, outputs: int) -> ReplicatedLinear:
            return ReplicatedLinear(inputs, outputs, ctx, init=init, bias=False, on_sequence=True)

        self.linear_wq_b = linear(config.q_lora_rank, self.heads * self.size)
        self.linear_weights_proj = linear(config.hidden_size, self.heads)
        self.compressor = Compressor(config, self.size, ratio, self.rotated, ctx, overlaps=True)

    def project(self, x: Tensor, source: Tensor, angles: RotaryAngles) -> IndexQueries:
        """x [B, S, hidden], the input of attention; source [B, S, C], the latent of its queries."""
        cos, sin = (self._own(part) for part in (angles.cos, angles.sin))
        queries = self.linear_wq_b(source).unflatten(-1, (self.heads, self.size))
        weights = F.linear(x.float(), effective_weight(self.linear_weights_proj).float()) * self.heads**-0.5
        return IndexQueries(rotate_last(queries, cos, sin, self.rotated), weights)

    def _own(self, values: Tensor) -> Tensor:
        tp = self.ctx.tp
        return values.chunk(tp.size, SEQUENCE_DIM)[tp.rank] if self.ctx.sequence_parallel else values


# -- attention ---------------------------------------------------------------------------------------


class CompressedAttention(nn.Module):
    """x -> linear_proj(attention): [B, S, hidden] -> the same. number: of the layer, from 0."""

    def __init__(self, config: CompressedAttentionConfigLike, ctx: ParallelContext, number: int) -> None:
        super().__init__()
        self.ctx, self.heads, self.head_dim = ctx, config.num_attention_heads, config.head_dim
        self.rotated, self.window = config.qk_pos_emb_head_dim, config.sliding_window
        self.ratio, self.topk = config.compression_of(number), config.dsa_indexer_topk
        self.dense, self.coefficient = config.dsa_dense_warmup, config.dsa_indexer_loss_coeff
        self.sparse_loss = config.dsa_indexer_use_sparse_loss
        self.dropout = AttentionDropout(config.attention_dropout, ctx)
        self._declare_projections(config)
        self.core_attention = Sinks(self.heads, ctx)
        self.compressor: Compressor | None = None
        self.indexer: EntryIndexer | None = None
        if self.ratio:
            overlaps = config.is_indexed(number)
            self.compressor = Compressor(config, self.head_dim, self.ratio, self.rotated, ctx, overlaps=overlaps)
            self.indexer = EntryIndexer(config, self.ratio, ctx) if overlaps else None
        learns = self.indexer is not None and self.coefficient > 0
        self.loss = AuxiliaryLoss(f"dsa/layer_{number}/indexer_loss") if learns else None

    def _declare_projections(self, config: CompressedAttentionConfigLike) -> None:
        hidden, ctx, init = config.hidden_size, self.ctx, normal(config.init_method_std)
        self.linear_q_down_proj = ReplicatedLinear(
            hidden, config.q_lora_rank, ctx, init=init, bias=False, on_sequence=True
        )
        self.q_layernorm = Float32RMSNorm(config.q_lora_rank, config.norm_epsilon, ctx)
        self.linear_q_up_proj = ColumnParallelLinear(
            config.q_lora_rank, self.heads * self.head_dim, ctx, bias=False, init=init
        )
        self.head_norm = ScaleFreeRMSNorm(config.norm_epsilon)
        self.linear_kv_proj = ReplicatedLinear(hidden, self.head_dim, ctx, init=init, bias=False, on_sequence=True)
        self.kv_layernorm = Float32RMSNorm(self.head_dim, config.norm_epsilon, ctx)
        self.linear_o_group_proj = GroupedProjection(config, ctx)
        self.linear_proj = RowParallelLinear(
            config.o_groups * config.o_lora_rank, hidden, ctx, bias=False, init=normal(config.output_init_std)
        )

    def forward(self, x: Tensor, pattern: AttentionPattern, angles: RotaryAngles | None, cache: Cache | None) -> Tensor:
        assert angles is not None
        # Layers without entries have other frequencies.
        angles = angles if self.ratio else angles.within(self.window)
        source = self.q_layernorm(self.linear_q_down_proj(x))
        queries = self.head_norm(self.linear_q_up_proj(source).unflatten(-1, (-1, self.head_dim)))
        queries = rotate_last(queries, angles.cos, angles.sin, self.rotated)
        keys = rotate_last(self._of_all_heads(self.kv_layernorm(self.linear_kv_proj(x))), *_flat(angles), self.rotated)
        if cache is not None:
            return self._project(self._cached(x, source, queries, keys, angles, cache), angles)
        return self._over_sequence(x, source, queries, keys, pattern.segment_ids, angles)

    def _of_all_heads(self, keys: Tensor) -> Tensor:
        """[B, S, D] of this rank's positions -> of all. Each rank uses them for its own heads, so that backward sums
        over ranks."""
        if self.ctx.sequence_parallel:
            return gather_from(keys, SEQUENCE_DIM, self.ctx.tp)
        return copy_to(keys, self.ctx.tp)

    def _project(self, out: Tensor, angles: RotaryAngles) -> Tensor:
        """[B, S, heads of this rank, D] -> [B, S, hidden]"""
        turned_back = rotate_last(out, angles.cos, -angles.sin, self.rotated)
        projected: Tensor = self.linear_proj(self.linear_o_group_proj(turned_back))
        return projected

    # -- whole sequences -----------------------------------------------------------------------------

    def _over_sequence(
        self, x: Tensor, source: Tensor, queries: Tensor, keys: Tensor, segments: Tensor | None, angles: RotaryAngles
    ) -> Tensor:
        length = keys.shape[1]
        if self.compressor is None:
            return self._project(self._attend(queries, keys, None, None, segments), angles)
        runs = runs_of(length, self.ratio, segments, x.device)
        entries = self.compressor(x, runs, angles)
        # Under sequence parallelism the gradient is summed behind the projections, in `gather_from`.
        entries = entries if self.ctx.sequence_parallel else copy_to(entries, self.ctx.tp)
        visible = runs.visible(segments, length)
        scores, allowed = self._scores(x, source, runs, angles), visible
        if scores is not None and self._chooses(entries.shape[1]):
            allowed = visible & among(self._chosen(scores, visible), entries.shape[1])
        out = self._project(self._attend(queries, keys, entries, allowed, segments), angles)
        if self.loss is None or scores is None or not self._learns:
            return out
        mask = allowed if self.sparse_loss else visible
        target = self._target(queries, keys, entries, mask, segments)
        return self.loss(out, self.coefficient * self._loss(scores, target, mask))

    def _attend(
        self, queries: Tensor, keys: Tensor, entries: Tensor | None, allowed: Tensor | None, segments: Tensor | None
    ) -> Tensor:
        blocks = list(query_blocks(queries, keys, entries, allowed, segments, self.window))
        sinks, rate = self.core_attention.softmax_offset, self.dropout.begin()
        again = torch.is_grad_enabled() and len(blocks) > 1
        out = [
            checkpoint(attend_block, block, sinks, rate, use_reentrant=False)
            if again
            else attend_block(block, sinks, rate)
            for block in blocks
        ]
        return out[0] if len(out) == 1 else torch.cat(out, 1)

    # -- the indexer ---------------------------------------------------------------------------------

    @property
    def _learns(self) -> bool:
        return self.loss is not None and self.training and torch.is_grad_enabled()

    def _chooses(self, entries: int) -> bool:
        """Whether entries are left out."""
        return entries > self.topk and not self.dense

    def _scores(self, x: Tensor, source: Tensor, runs: Runs, angles: RotaryAngles) -> Tensor | None:
        """[B, S, T] of this rank's positions; None where no one needs them."""
        indexer, learns = self.indexer, self._learns
        count = runs.ends.shape[1]
        if indexer is None or count == 0 or not (learns or self._chooses(count)):
            return None
        with torch.set_grad_enabled(learns):
            # Detached: the model learns from the language model's loss alone.
            x, source = x.detach(), source.detach()
            asked = indexer.project(x, source, angles)
            return indexer.score(asked.queries, asked.weights, indexer.compressor(x, runs, angles))

    def _chosen(self, scores: Tensor, visible: Tensor) -> Tensor:
        """[B, S, topk] of all positions; some of a query that sees fewer are not seen."""
        chosen = chosen_keys(scores, self._own_rows(visible), self.topk)
        return all_gather(chosen, SEQUENCE_DIM, self.ctx.tp) if self.ctx.sequence_parallel else chosen

    def _own_rows(self, values: Tensor) -> Tensor:
        """[B or 1, S, T] of all positions -> of this rank's, under sequence parallelism."""
        tp = self.ctx.tp
        return values.chunk(tp.size, 1)[tp.rank] if self.ctx.sequence_parallel else values

    @torch.no_grad()
    def _target(self, queries: Tensor, keys: Tensor, entries: Tensor, mask: Tensor, segments: Tensor | None) -> Tensor:
        """[B, S, T]: the attention to the entries among `mask`, summed over all heads, as a distribution; of this
        rank's positions."""
        sinks, count = self.core_attention.softmax_offset, entries.shape[1]
        blocks = query_blocks(queries, keys, entries, mask, segments, self.window)
        total = torch.cat([block_weights(block, sinks)[..., -count:].sum(2) for block in blocks], 1)
        total = self._own_rows(all_reduce(total, self.ctx.tp) if self.ctx.tp.size > 1 else total)
        return total / total.sum(-1, keepdim=True).clamp_min(torch.finfo(total.dtype).tiny)

    def _loss(self, scores: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        mask = self._own_rows(mask)
        # A query that sees no entry yet: equal scores and an equal target, whose divergence and gradient are 0.
        sees = mask.any(-1, keepdim=True)
        even = torch.full_like(target, 1.0 / target.shape[-1])
        return indexer_loss(torch.where(sees, scores, 0.0), torch.where(sees, target, even), mask | ~sees, self.ctx)

    # -- a cache -------------------------------------------------------------------------------------

    def cached_state(self) -> PositionState:
        """The keys of the window; entries are with the compressors."""
        return PositionState(((self.head_dim,),), self.linear_kv_proj.weight.dtype, self.window, is_paged=True)

    def _cached(
        self, x: Tensor, source: Tensor, queries: Tensor, keys: Tensor, angles: RotaryAngles, cache: Cache
    ) -> Tensor:
        entries = None if self.compressor is None else self.compressor.entries_of_sequences(x, angles, cache)
        asked, index_entries = self._asked_cached(x, source, angles, cache)
        starts, sinks = starts_of_sequences(cache), self.core_attention.softmax_offset

        def attend(queries: Tensor, *rest: Tensor) -> Tensor:
            *asked, keys = rest
            start, compressed = next(starts), None if entries is None else next(entries)
            visible = (
                None
                if compressed is None
                else visible_entries(start, queries.shape[1], compressed.shape[1], self.ratio, compressed)
            )
            if compressed is not None and visible is not None and index_entries is not None:
                compressed, visible = self._chosen_cached(compressed, visible, asked, next(index_entries))
            blocks = query_blocks(queries, keys, compressed, visible, None, self.window)
            return torch.cat([attend_block(block, sinks, 0.0) for block in blocks], 1)

        def attend_paged(pages: Pages, queries: Tensor, *rest: Tensor) -> Tensor:
            asked = [x.transpose(0, 1) for x in rest[:-1]]
            compressed = None if entries is None else next(entries)
            index = None if index_entries is None else next(index_entries)
            return self._attend_paged(pages, queries.transpose(0, 1), rest[-1], compressed, asked, index)

        return cache.attend(self, attend, (queries, *asked), (keys,), attend_paged)

    def _attend_paged(
        self,
        pages: Pages,
        queries: Tensor,
        keys: Tensor,
        entries: Tensor | None,
        asked: list[Tensor],
        index_entries: Tensor | None,
    ) -> Tensor:
        """queries [B, 1, N, D], keys [places, D] of the whole cache, entries [B, T, D] -> [1, B, N, D], for the new
        position of each of B sequences. Shapes do not depend on positions."""
        distance = torch.arange(min(self.window, pages.room), device=keys.device)
        positions = pages.last[:, None] - distance
        values, seen = keys[pages.places(positions.clamp(min=0))], (positions >= 0).unsqueeze(1)
        if entries is not None:
            numbers = torch.arange(entries.shape[1], device=keys.device)
            visible = (numbers < ((pages.last + 1) // self.ratio)[:, None]).unsqueeze(1)
            if self.indexer is not None and index_entries is not None and self._chooses(entries.shape[1]):
                chosen = chosen_keys(self.indexer.score(asked[0], asked[1], index_entries), visible, self.topk)
                visible = visible.gather(-1, chosen)
                entries = entries.gather(1, chosen.transpose(1, 2).expand(-1, -1, self.head_dim))
            # Nothing that is no number may be multiplied by a weight of 0.
            entries = entries.masked_fill(~visible.transpose(1, 2), 0.0)
            values, seen = torch.cat((values, entries.to(values.dtype)), 1), torch.cat((seen, visible), -1)
        block = QueryBlock(queries, values, seen)
        return attend_block(block, self.core_attention.softmax_offset, 0.0).transpose(0, 1)

    def _asked_cached(
        self, x: Tensor, source: Tensor, angles: RotaryAngles, cache: Cache
    ) -> tuple[tuple[Tensor, ...], Iterator[Tensor] | None]:
        """What the indexer asks for at each new position, and its entries of each sequence."""
        if self.indexer is None:
            return (), None
        inputs = self.indexer.project(x, source, angles)
        asked: tuple[Tensor, ...] = (inputs.queries, inputs.weights)
        if self.ctx.sequence_parallel:
            asked = tuple(all_gather(part, SEQUENCE_DIM, self.ctx.tp) for part in asked)
        return asked, self.indexer.compressor.entries_of_sequences(x, angles, cache)

    def _chosen_cached(
        self, entries: Tensor, visible: Tensor, asked: list[Tensor], index_entries: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The entries and which of them each query sees, after the indexer's choice."""
        count = entries.shape[1]
        if self.indexer is None or not self._chooses(count):
            return entries, visible
        chosen = chosen_keys(self.indexer.score(asked[0], asked[1], index_entries), visible, self.topk)
        if chosen.shape[1] > 1:
            return entries, visible & among(chosen, count)
        # One query reads its own entries alone, whatever the length of the sequence.
        return entries[:, chosen[0, 0]], visible.gather(-1, chosen)


# -- blocks of queries -------------------------------------------------------------------------------


@dataclass(frozen=True)
class QueryBlock:
    """queries [B, S, N, D] and all that they see: values [B, K, D], which are keys too, seen [B or 1, S, K] bool."""

    queries: Tensor
    values: Tensor
    seen: Tensor


def query_blocks(
    queries: Tensor,
    keys: Tensor,
    entries: Tensor | None,
    visible: Tensor | None,
    segments: Tensor | None,
    window: int,
) -> Iterator[QueryBlock]:
    """Queries [B, S, N, D], the last S of the T positions of keys [B, T, D], with the keys in their windows and all
    entries [B, E, D], of which visible [B or 1, S, E] are seen. segments [B, T]: documents."""
    count, before = queries.shape[1], keys.shape[1] - queries.shape[1]
    size = max(window, QUERIES_AT_ONCE)
    for start in range(0, count, size):
        stop = min(start + size, count)
        first, end = max(before + start - window + 1, 0), before + stop
        places = torch.arange(first, end, device=keys.device)
        distance = torch.arange(before + start, end, device=keys.device)[:, None] - places[None]
        seen = ((distance >= 0) & (distance < window))[None]
        if segments is not None:
            seen = seen & (segments[:, before + start : end, None] == segments[:, None, first:end])
        values = keys[:, first:end]
        if entries is not None and visible is not None:
            values = torch.cat((values, entries.to(values.dtype)), 1)
            rows = visible[:, start:stop]
            batch = max(seen.shape[0], rows.shape[0])
            seen = torch.cat((seen.expand(batch, -1, -1), rows.expand(batch, -1, -1)), -1)
        yield QueryBlock(queries[:, start:stop], values, seen)


def block_weights(block: QueryBlock, sinks: Tensor) -> Tensor:
    """[B, S, N, K] in fp32: softmax weights, which sum to less than 1 by the weight of the sink."""
    heads, size = block.queries.shape[2:]
    # All heads have the same keys: [B, S N, D] x [B, D, K] in one product.
    scores = (block.queries.flatten(1, 2) @ block.values.transpose(1, 2)).unflatten(1, (-1, heads))
    scores = (scores.float() * size**-0.5).masked_fill(~block.seen.unsqueeze(2), float("-inf"))
    sink = sinks.float()[None, None, :, None].expand(*scores.shape[:3], 1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]


def attend_block(block: QueryBlock, sinks: Tensor, dropout: float) -> Tensor:
    """[B, S, N, D]"""
    weights = F.dropout(block_weights(block, sinks).to(block.values.dtype), dropout)
    return (weights.flatten(1, 2) @ block.values).unflatten(1, weights.shape[1:3])


def visible_entries(start: int, count: int, entries: int, ratio: int, like: Tensor) -> Tensor:
    """[1, S, E] bool: which of a sequence's entries are seen by `count` positions from `start` on."""
    positions = torch.arange(start + 1, start + count + 1, device=like.device)
    return (torch.arange(entries, device=like.device)[None] < (positions // ratio)[:, None])[None]


def _flat(angles: RotaryAngles) -> tuple[Tensor, Tensor]:
    """cos and sin for values without heads: [B or 1, S, R / 2]."""
    return angles.cos.squeeze(2), angles.sin.squeeze(2)
