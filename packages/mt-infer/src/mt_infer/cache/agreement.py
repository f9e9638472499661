"""What the ranks of a model decide together: which prefixes are shared, and when memory has run out.

Each has a scheduler of its own, and their layers differ: a pipeline stage may lack a kind of layer that another has, or
have none that keeps anything. Nor do ranks have the same memory.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeVar

import torch.distributed as dist

from mt_core.parallel.context import ParallelContext
from mt_infer.cache.layout import CacheGroup, CacheLayout

ValueT = TypeVar("ValueT")


def agreed_layout(own: CacheLayout, format: str, ctx: ParallelContext) -> CacheLayout:
    """With a group, of no layers here, for each window of another rank's layers. Collective over the model's ranks."""
    kinds = _of_all_ranks(([group.window for group in own.groups], own.keeps_recurrent_states), ctx)
    windows = {window for windows, _ in kinds for window in windows}
    groups = {group.window: group for group in own.groups}
    ordered = sorted(windows, key=lambda window: window or math.inf, reverse=True)
    return replace(
        own,
        groups=tuple(groups.get(window) or CacheGroup(window, (), (), format) for window in ordered),
        keeps_recurrent_states=any(recurrent for _, recurrent in kinds),
    )


def agreed_counts(own: tuple[int, ...], ctx: ParallelContext) -> tuple[int, ...]:
    """Blocks of each group: as many as every rank has. Collective over the model's ranks."""
    return tuple(min(counts) for counts in zip(*_of_all_ranks(own, ctx), strict=True))


def _of_all_ranks(own: ValueT, ctx: ParallelContext) -> list[ValueT]:
    everyone = [own]
    for axis in (ctx.tp, ctx.pp):
        if axis.group is not None:
            found = [everyone] * axis.size
            dist.all_gather_object(found, everyone, group=axis.group)
            everyone = [one for part in found for one in part]
    return everyone
