"""The same limits of the cache on every rank of a model.

Each rank has a scheduler, and all have to make the same decisions. The layers of pipeline stages differ in number and
kind, and ranks differ in free memory: so each counts blocks as the rank would that has the least room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from mt_core.parallel.context import Axis
from mt_infer.cache.layout import CacheGroup, CacheLayout, CacheLimits, widest_first


@dataclass(frozen=True)
class _Needs:
    """Of a rank: bytes of a position in each group, by its window; of a sequence; and what it has in all."""

    positions: dict[int | None, int]
    sequence: int
    memory: int


def agree(layout: CacheLayout, limits: CacheLimits, axis: Axis) -> tuple[CacheLayout, CacheLimits]:
    """Collective over the axis, the ranks of one model. The layout has the groups of all ranks, some without layers."""
    # `axis` is "model": all ranks along tp and pp.
    if axis.size == 1:
        return layout, limits
    own = _Needs(
        {group.window: group.bytes_per_position for group in layout.groups}, layout.bytes_per_sequence, limits.memory
    )
    found: list[_Needs | None] = [None] * axis.size
    # Example, pp=2: stage 0 has a group of full attention with 4 KiB a position, stage 1 one of full attention with 8
    # KiB and one of a window. Both count 8 KiB and the window's bytes, and have as many blocks of either; the tensors
    # of stage 0 take less.
    dist.all_gather_object(found, own, group=axis.group)
    ranks = [one for one in found if one is not None]
    groups = tuple(
        _group(window, layout, ranks) for window in widest_first(key for one in ranks for key in one.positions)
    )
    sequence = max(one.sequence for one in ranks)
    agreed = replace(layout, groups=groups, bytes_per_sequence=sequence)
    # The smallest memory: a rank with more of it leaves the difference unused.
    return agreed, replace(limits, memory=min(one.memory for one in ranks))


def _group(window: int | None, layout: CacheLayout, ranks: Sequence[_Needs]) -> CacheGroup:
    size = max(one.positions.get(window, 0) for one in ranks)
    own = [group for group in layout.groups if group.window == window]
    # Without layers no tensors are allocated, but sequences have tables in the group: they run out of blocks, and are
    # preempted, at the same step as on the ranks that have the layers.
    return replace(own[0], bytes_per_position=size) if own else CacheGroup(window, (), (), "auto", size)
