"""Weights that several pipeline stages hold, such as word vectors that are the output matrix too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from mt_core.parallel.context import Axis, ParallelContext


@dataclass(frozen=True)
class StageCopies:
    """Of this rank's weights. axes: name -> the pipeline ranks that hold it, of which the first counts.

    The gradient of such a weight is the sum of its copies' gradients.
    """

    axes: Mapping[str, Axis] = field(default_factory=dict)


def find_stage_copies(names: Iterable[str], ctx: ParallelContext) -> StageCopies:
    """names: this rank's parameters. Collective over the world."""
    if ctx.pp.size == 1:
        return StageCopies()
    own = list(names)
    everyone: list[list[str] | None] = [None] * ctx.pp.size
    dist.all_gather_object(everyone, own, group=ctx.pp.group)
    places: dict[str, tuple[int, ...]] = {}
    for place, held in enumerate(everyone):
        for name in held or []:
            places[name] = (*places.get(name, ()), place)
    several = {name: held for name, held in places.items() if len(held) > 1}
    axes = {held: _build_axis(held, ctx) for held in sorted(set(several.values()))}
    return StageCopies({name: axes[held] for name, held in several.items() if ctx.pp.rank in held})


def _build_axis(places: tuple[int, ...], ctx: ParallelContext) -> Axis:
    """The axis of the pipeline ranks at `places`. Every process makes the group of every pipeline, as torch asks."""
    world = dist.get_world_size()
    stage_size = world // ctx.pp.size
    own = Axis()
    for offset in range(stage_size):
        ranks = tuple(place * stage_size + offset for place in places)
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            assert isinstance(group, dist.ProcessGroup)
            own = Axis(len(ranks), ranks.index(dist.get_rank()), group, ranks)
    return own
