"""What the queries of this rank see of the keys of another: the attention pattern, block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.context_parallel.zigzag import shard_positions, visible_rows
from mt_core.parallel.collectives import all_gather
from mt_core.parallel.context import Axis


@dataclass(frozen=True)
class BlockMask:
    """causal: query i sees keys 0 to i of a square block. bias [B or 1, N or 1, S, T], fp32: added to the scores,
    -inf where a key is hidden; it then says all, and causal is False. Neither: every query sees every key."""

    causal: bool = False
    bias: Tensor | None = None


@dataclass(frozen=True)
class ShardedPattern:
    """An AttentionPattern over sequences in zig-zag shards.

    segment_ids: [CP, B, 2c], those of every rank in the order of its shard. alibi_slopes: [N]. window: of the whole
    sequence's positions.
    """

    axis: Axis
    chunk: int
    device: torch.device
    causal: bool
    segment_ids: Tensor | None = None
    alibi_slopes: Tensor | None = None
    window: int | None = None

    def rows(self, source: int, reader: int) -> tuple[slice, slice]:
        """(query rows, key rows), as visible_rows."""
        return visible_rows(source, reader, self.chunk, self.causal)

    def own_mask(self) -> BlockMask:
        """All queries of this rank on all its keys: in a shard, tokens stand in the order of the sequence."""
        if self._is_plain:
            return BlockMask(causal=self.causal)
        everything = slice(0, 2 * self.chunk)
        return BlockMask(bias=self._bias([self.axis.rank], everything, everything))

    def mask(self, sources: Sequence[int]) -> BlockMask:
        """The rectangle of `rows`, for other ranks that are all before or all after this one, laid end to end."""
        # The rectangle of `rows` is seen as a whole.
        if self._is_plain:
            return BlockMask()
        return BlockMask(bias=self._bias(sources, *self.rows(sources[0], self.axis.rank)))

    @property
    def _is_plain(self) -> bool:
        return self.segment_ids is None and self.alibi_slopes is None and self.window is None

    def _bias(self, sources: Sequence[int], query_rows: slice, key_rows: slice) -> Tensor:
        """[B or 1, N or 1, S, T] for S query rows of this rank and the key rows of each source."""
        # By positions in the whole sequence: a shard has a gap between its two chunks.
        rank = self.axis.rank
        key_positions = torch.cat([self._positions(source)[key_rows] for source in sources])
        distance = self._positions(rank)[query_rows, None] - key_positions[None, :]  # [S, T]
        bias = torch.zeros(1, 1, *distance.shape, device=self.device)
        if self.alibi_slopes is not None:
            bias = bias - self.alibi_slopes.float()[None, :, None, None] * distance
        if self.causal:
            bias = bias.masked_fill(distance < 0, -math.inf)
        if self.window is not None:
            bias = bias.masked_fill(distance.abs() >= self.window, -math.inf)
        # As the keys, the ids are cut to the rows that this rank sees, and laid end to end.
        if self.segment_ids is not None:
            queries = self.segment_ids[rank][:, query_rows]  # [B, S]
            keys = torch.cat([self.segment_ids[source][:, key_rows] for source in sources], 1)  # [B, T]
            bias = bias.masked_fill((queries[:, :, None] != keys[:, None, :])[:, None], -math.inf)
        return bias

    def _positions(self, rank: int) -> Tensor:
        return shard_positions(rank, self.axis.size, self.chunk, self.device)


class SegmentGatherer:
    """Segment ids of all ranks, gathered once for each tensor of them: layers of a forward share theirs.

    The results live as long as the tensor, so a recomputed layer finds them again.
    """

    def __init__(self, axis: Axis, arrange: Callable[[Tensor], Tensor]) -> None:
        """arrange: what to make of the gathered [CP, B, 2c]."""
        self.axis = axis
        self.arrange = arrange
        self._known = WeakTensorKeyDictionary()

    def __call__(self, segment_ids: Tensor | None) -> Tensor | None:
        """[B, 2c] of this rank -> arrange([CP, B, 2c]) of all, int32. Collective at the first call for a tensor."""
        if segment_ids is None:
            return None
        if segment_ids not in self._known:
            gathered = all_gather(segment_ids.to(torch.int32)[None], 0, self.axis)
            self._known[segment_ids] = self.arrange(gathered)
        arranged: Tensor = self._known[segment_ids]
        return arranged


def shard_pattern(pattern: AttentionPattern, q: Tensor, axis: Axis, gather: SegmentGatherer) -> ShardedPattern:
    """The pattern for queries q [B, 2c, N, D] of this rank; pattern.segment_ids [B, 2c] are this rank's too."""
    # A window that reaches over the whole sequence is none, and then blocks need no bias.
    pattern = pattern.over(q.shape[1] * axis.size)
    return ShardedPattern(
        axis,
        q.shape[1] // 2,
        q.device,
        pattern.causal,
        gather(pattern.segment_ids),
        pattern.alibi_slopes,
        pattern.window,
    )
