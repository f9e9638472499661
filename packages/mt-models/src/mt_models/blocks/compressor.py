"""Compression of keys along a sequence (DeepSeek-V4, 2026): each run of `ratio` positions becomes one entry.

For the inputs x of attention, channel by channel, with a softmax over the positions i of a run:

    entry = rotate(norm(sum over i of softmax_i(W_g x_i + b_i) W_kv x_i))      at the position of the run's first

An entry is seen by the queries from the last position of its run on. Runs that overlap have twice as many channels in
W_kv, W_g and b: an entry is made of the second half of its own run and of the first half of the run before, of
2 * ratio positions together. Runs are counted from the beginning of each document; a run that is not complete has no
entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn.cache import Cache, Pages, PositionState
from mt_core.nn.layout import LayoutModule, ParameterLayout, normal, sequence_axes, zeros
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.parallel.collectives import all_gather, gather_from
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.linear import ReplicatedLinear
from mt_models.blocks.norm import Float32RMSNorm
from mt_models.blocks.rotary import RotaryAngles, rotate


class CompressorConfigLike(Protocol):
    """What a compressor reads from the configuration of its model."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def norm_epsilon(self) -> float: ...
    @property
    def init_method_std(self) -> float: ...


@dataclass(frozen=True)
class Runs:
    """The complete runs of the sequences of a batch: T of them, as many as one document of a whole sequence has.

    ends [B or 1, T] int64: the last position of each, in the sequence. exist [B or 1, T] bool: False for those that a
    sequence with several documents does not have. follow: whether a run of the same document is before it.
    segments [B or 1, T]: the document of each, where there are several.
    """

    ratio: int
    ends: Tensor
    exist: Tensor
    follow: Tensor
    segments: Tensor | None

    def visible(self, segment_ids: Tensor | None, length: int) -> Tensor:
        """[B or 1, S, T] bool: the entries that a query sees."""
        positions = torch.arange(length, device=self.ends.device)
        seen = (self.ends[:, None, :] <= positions[None, :, None]) & self.exist[:, None, :]
        if segment_ids is None or self.segments is None:
            return seen
        return seen & (segment_ids[:, :, None] == self.segments[:, None, :])


def runs_of(length: int, ratio: int, segment_ids: Tensor | None, device: torch.device) -> Runs:
    """segment_ids [B, S]: the document of each position; None: sequences are one document."""
    count = length // ratio
    if segment_ids is None:
        ends = torch.arange(1, count + 1, device=device)[None] * ratio - 1
        return Runs(ratio, ends, torch.ones_like(ends, dtype=torch.bool), ends >= ratio, None)
    places = places_in_documents(segment_ids)
    is_end = places % ratio == ratio - 1
    # Stable: the ends of runs in their order, and behind them positions that are none.
    ends = (~is_end).byte().argsort(dim=1, stable=True)[:, :count]
    return Runs(
        ratio, ends, is_end.gather(1, ends), places.gather(1, ends) >= 2 * ratio - 1, segment_ids.gather(1, ends)
    )


def places_in_documents(segment_ids: Tensor) -> Tensor:
    """[B, S] -> [B, S]: the number of positions of the same document before each."""
    positions = torch.arange(segment_ids.shape[1], device=segment_ids.device)[None].expand_as(segment_ids)
    begins = torch.ones_like(segment_ids, dtype=torch.bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return positions - torch.where(begins, positions, 0).cummax(1).values


class EntryStore(nn.Module):
    """Entries in the cache. Those of a run are in the places of the run behind it, a part of the channels in each."""

    def __init__(self, channels: int, ratio: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.channels, self.ratio, self.dtype = channels, ratio, dtype
        self.part = -(-channels // ratio)

    def cached_state(self) -> PositionState:
        return PositionState(((self.part,),), self.dtype, is_paged=True)

    def parts(self, entries: Tensor, first: int, start: int, count: int) -> Tensor:
        """What positions from `start` on keep: [1, count, part]. entries [1, E, D]: those of the runs from number
        `first` on."""
        # A row of zeros before them: what the first run keeps, which has none before it.
        padded = F.pad(entries, (0, self.ratio * self.part - self.channels, 1, 0))
        positions = torch.arange(start, start + count, device=entries.device)
        run = positions // self.ratio - 1
        rows = padded[:, torch.where(run < 0, 0, run - first + 1)].unflatten(-1, (self.ratio, self.part))
        return rows[:, torch.arange(count, device=entries.device), positions % self.ratio]

    def complete(self, parts: Tensor, newest: Tensor) -> Tensor:
        """parts [1, K, part] of all positions, newest [1, 1, D]: the entry of the last complete run -> all [1, T, D]"""
        count = parts.shape[1] // self.ratio
        if count < 2:
            return newest[:, :count]
        stored = parts[:, self.ratio : count * self.ratio].unflatten(1, (count - 1, self.ratio)).flatten(2)
        return torch.cat((stored[..., : self.channels].to(newest.dtype), newest), 1)

    def parts_paged(self, entries: Tensor, last: Tensor) -> Tensor:
        """What the position `last` [B] of each sequence keeps: [B, part]. entries [B, 2, D]: see `newest_paged`."""
        first = torch.where((last < self.ratio)[:, None], 0.0, entries[:, 0])
        parts = F.pad(first, (0, self.ratio * self.part - self.channels)).unflatten(-1, (self.ratio, self.part))
        return parts.gather(1, (last % self.ratio)[:, None, None].expand(-1, 1, self.part)).squeeze(1)

    def complete_paged(self, pages: Pages, parts: Tensor, newest: Tensor) -> Tensor:
        """parts [places, part] of the whole cache, newest [B, 2, D] -> the entries of all runs that there is room for,
        [B, T, D]. Those of runs that are not complete are of no meaning."""
        positions = torch.arange(pages.room, device=parts.device).expand(len(newest), -1)
        count = -(-pages.room // self.ratio)
        stored = F.pad(parts[pages.places(positions)], (0, 0, 0, count * self.ratio - pages.room))
        by_run = stored.unflatten(1, (count, self.ratio)).flatten(2)[..., : self.channels].to(newest.dtype)
        # A run keeps the entry of the one before it. The last two are put into their places by the number.
        entries = torch.cat((by_run[:, 1:], newest[:, 1:]), 1)
        runs = (pages.last // self.ratio)[:, None, None].expand(-1, 1, self.channels)
        # In this order: the first run has none before it.
        return entries.scatter(1, (runs - 1).clamp(min=0), newest[:, :1]).scatter(1, runs, newest[:, 1:])


class Compressor(LayoutModule):
    """x [B, S, hidden] -> entries [B, T, D].

    Replicated on tensor-parallel ranks: entries serve the heads of all. position_bias [ratio, channels] is in fp32, the
    softmax too. rotated: the last so many channels of an entry have positions.
    """

    position_bias: Tensor

    def __init__(
        self,
        config: CompressorConfigLike,
        size: int,
        ratio: int,
        rotated: int,
        ctx: ParallelContext,
        *,
        overlaps: bool,
    ) -> None:
        super().__init__(ctx)
        self.size, self.ratio, self.rotated, self.overlaps = size, ratio, rotated, overlaps
        channels, init = size * (2 if overlaps else 1), normal(config.init_method_std)

        def linear() -> ReplicatedLinear:
            return ReplicatedLinear(config.hidden_size, channels, ctx, init=init, bias=False, on_sequence=True)

        self.linear_kv, self.linear_gate = linear(), linear()
        # Under sequence parallelism what follows is repeated on every rank, for the heads of the rank.
        partial = sequence_axes(ctx)
        layout = ParameterLayout((ratio, channels), zeros, partial_gradient=partial, dtype=torch.float32)
        self.declare("position_bias", layout)
        self.norm = Float32RMSNorm(size, config.norm_epsilon, ctx)
        self.store = EntryStore(size, ratio, self.linear_kv.weight.dtype)

    def forward(self, x: Tensor, runs: Runs, angles: RotaryAngles) -> Tensor:
        """x [B, S, hidden] of this rank's positions -> the entries of all runs [B, T, D]. angles: of all positions."""
        kv, gate = self.linear_kv(x), self.linear_gate(x)
        if self.ctx.sequence_parallel:
            kv, gate = (gather_from(part, SEQUENCE_DIM, self.ctx.tp) for part in (kv, gate))
        # [B or 1, T, ratio]: the positions of each run.
        inside = (runs.ends[..., None] + torch.arange(1 - self.ratio, 1, device=x.device)).clamp(min=0)
        entries = self.pooled(_rows(kv, inside), _rows(gate, inside), runs.follow, _before(kv, gate, inside, self))
        cos, sin = (_rows(part[:, :, 0], inside[..., :1]).squeeze(2) for part in (angles.cos, angles.sin))
        return rotate_last(entries, cos, sin, self.rotated)

    def pooled(self, kv: Tensor, gate: Tensor, follow: Tensor, before: tuple[Tensor, Tensor] | None) -> Tensor:
        """kv, gate [B, T, ratio, channels] of the runs -> [B, T, D], normalized. before: with overlap the first halves
        of the runs before, [B, T, ratio, D] each; follow [B or 1, T]: which have one."""
        gate = gate.float() + self.position_bias
        if before is not None:
            before_kv, before_gate = before
            before_gate = before_gate.float() + self.position_bias[:, : self.size]
            before_gate = before_gate.masked_fill(~follow[..., None, None], float("-inf"))
            kv = torch.cat((before_kv, kv[..., self.size :]), 2)
            gate = torch.cat((before_gate, gate[..., self.size :]), 2)
        normed: Tensor = self.norm((kv * gate.softmax(2).to(kv.dtype)).sum(2))
        return normed

    # -- a cache -------------------------------------------------------------------------------------

    def cached_state(self) -> PositionState:
        """What runs that are not complete, or were not when the positions began, are made of."""
        channels = self.size * (2 if self.overlaps else 1)
        # The run before that of a position, and with overlap the one before that.
        window = (3 if self.overlaps else 2) * self.ratio
        return PositionState(((channels,), (channels,)), self.linear_kv.weight.dtype, window, is_paged=True)

    def entries_of_sequences(self, x: Tensor, angles: RotaryAngles, cache: Cache) -> Iterator[Tensor]:
        """All entries [1, T, D] of each sequence of the pass, in their order, with those that the new positions x
        [1, S, hidden] complete. In a step of one position of each of B sequences: [B, T, D] of all at once, of which
        those that are not complete yet are of no meaning."""
        kv, gate = self.linear_kv(x), self.linear_gate(x)
        if self.ctx.sequence_parallel:
            kv, gate = (all_gather(part, SEQUENCE_DIM, self.ctx.tp) for part in (kv, gate))
        starts, newest, all_entries = starts_of_sequences(cache), list[Tensor](), list[Tensor]()

        def compress(new: Tensor, kv: Tensor, gate: Tensor) -> Tensor:
            start, count = next(starts), new.shape[1]
            entries, first = self._newest_entries(kv, gate, start, count, angles)
            newest.append(entries[:, -1:])
            return self.store.parts(entries, first, start, count)

        def compress_paged(pages: Pages, new: Tensor, kv: Tensor, gate: Tensor) -> Tensor:
            newest.append(self.newest_paged(pages, kv, gate, angles))
            return self.store.parts_paged(newest[-1], pages.last)[None]

        parts = cache.attend(self, compress, (kv,), (kv, gate), compress_paged)
        last = iter(newest)

        def collect(new: Tensor, parts: Tensor) -> Tensor:
            all_entries.append(self.store.complete(parts, next(last)))
            return new

        def collect_paged(pages: Pages, new: Tensor, parts: Tensor) -> Tensor:
            all_entries.append(self.store.complete_paged(pages, parts, next(last)))
            return new

        cache.attend(self.store, collect, (parts,), (parts,), collect_paged)
        return iter(all_entries)

    def newest_paged(self, pages: Pages, kv: Tensor, gate: Tensor, angles: RotaryAngles) -> Tensor:
        """kv, gate [places, channels] of the whole cache -> [B, 2, D]: the entries of the run before that of the last
        position, and of the latter, which has a meaning where the position is its last."""
        runs = (pages.last // self.ratio - 1)[:, None] + torch.arange(2, device=kv.device)  # [B, 2]
        inside = runs[..., None] * self.ratio + torch.arange(self.ratio, device=kv.device)  # [B, 2, ratio]

        def rows(positions: Tensor) -> tuple[Tensor, Tensor]:
            # What is beyond the sequence is masked, or of no meaning.
            known = torch.minimum(positions.clamp(min=0), pages.last[:, None, None])
            places = pages.places(known.flatten(1)).view_as(known)
            return kv[places], gate[places]

        before = None
        if self.overlaps:
            before_kv, before_gate = rows(inside - self.ratio)
            before = before_kv[..., : self.size], before_gate[..., : self.size]
        entries = self.pooled(*rows(inside), runs > 0, before)
        at = angles.at(inside[..., 0].clamp(min=0))
        return rotate_last(entries, at.cos[:, :, 0], at.sin[:, :, 0], self.rotated)

    def _newest_entries(
        self, kv: Tensor, gate: Tensor, start: int, count: int, angles: RotaryAngles
    ) -> tuple[Tensor, int]:
        """The entries from that of the run before position `start` to the last complete one: [1, E, D], and the number
        of the first. kv, gate [1, K, channels] of the last K positions up to start + count."""
        end, ratio = start + count, self.ratio
        first, last = max(start // ratio - 1, 0), end // ratio
        if last <= first:
            return kv.new_zeros((1, 0, self.size)), first
        # Position p is in column p - offset.
        offset = end - kv.shape[1]
        inside = torch.arange(first * ratio, last * ratio, device=kv.device).view(1, last - first, ratio)
        follow = torch.arange(first, last, device=kv.device)[None] > 0
        columns = (inside - offset).clamp(min=0)
        entries = self.pooled(_rows(kv, columns), _rows(gate, columns), follow, _before(kv, gate, columns, self))
        at = angles.at(inside[..., 0])
        return rotate_last(entries, at.cos[:, :, 0], at.sin[:, :, 0], self.rotated), first


def _before(kv: Tensor, gate: Tensor, inside: Tensor, compressor: Compressor) -> tuple[Tensor, Tensor] | None:
    """The first halves of the runs before those whose positions are `inside` [B or 1, T, ratio]."""
    if not compressor.overlaps:
        return None
    # Of a run without one anything will do: it is masked.
    before = (inside - compressor.ratio).clamp(min=0)
    return _rows(kv[..., : compressor.size], before), _rows(gate[..., : compressor.size], before)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x [B or 1, S, C], index [B or 1, T, R] -> [B, T, R, C]"""
    if index.shape[0] == 1:
        return x[:, index[0]]
    batch = torch.arange(index.shape[0], device=x.device)[:, None, None]
    return x.expand(index.shape[0], -1, -1)[batch, index]


def rotate_last(x: Tensor, cos: Tensor, sin: Tensor, rotated: int) -> Tensor:
    """[..., D] with its last channels rotated, neighbours together, in fp32."""
    plain, turned = x.split((x.shape[-1] - rotated, rotated), -1)
    return torch.cat((plain, rotate(turned.float(), cos, sin, interleaved=True).to(x.dtype)), -1)


def starts_of_sequences(cache: Cache) -> Iterator[int]:
    """The number of positions before the new ones, of each sequence and of what fills a row up behind them."""
    return iter([*(sequence.start for sequence in cache.sequences), 0])
