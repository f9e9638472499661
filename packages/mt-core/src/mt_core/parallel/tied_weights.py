"""Weights tied over pipeline stages, such as token embeddings that are also the LM head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from mt_core.parallel.context import Axis, ParallelContext, new_group


@dataclass(frozen=True)
class TiedWeights:
    """The tied weights of this rank. axes: name -> the pipeline ranks that hold it; the first one counts it in sums.

    The gradient of such a weight is the sum of its copies' gradients.
    """

    axes: Mapping[str, Axis] = field(default_factory=dict)


def find_tied_weights(names: Iterable[str], ctx: ParallelContext) -> TiedWeights:
    """names: this rank's parameters. Collective over the world."""
    if ctx.pp.size == 1:
        return TiedWeights()
    own = list(names)
    # Names of the parameters of every pipeline rank; a name on several of them is tied.
    everyone: list[list[str] | None] = [None] * ctx.pp.size
    dist.all_gather_object(everyone, own, group=ctx.pp.group)
    places: dict[str, tuple[int, ...]] = {}
    for place, of_rank in enumerate(everyone):
        for name in of_rank or []:
            places[name] = (*places.get(name, ()), place)
    # Keeps the order of `places`, which is the same on all ranks of the pipeline.
    several = {name: stages for name, stages in places.items() if len(stages) > 1}
    # Sorted, since group creation is collective over the world: the order has to be the same on every rank. The keys
    # are equal on all of them, as pipelines differ in their tensor- and data-parallel ranks only.
    axes = {stages: _build_axis(stages, ctx) for stages in sorted(set(several.values()))}
    return TiedWeights({name: axes[stages] for name, stages in several.items() if ctx.pp.rank in stages})


def _build_axis(places: tuple[int, ...], ctx: ParallelContext) -> Axis:
    """The axis of the ranks at `places` of this process's pipeline; an axis of one process on other ranks."""
    if ctx.pp.rank not in places:
        new_group([dist.get_rank()])  # see new_group: every process makes one
        return Axis()
    ranks = tuple(ctx.pp.ranks[place] for place in places)
    return Axis(len(ranks), places.index(ctx.pp.rank), new_group(ranks), ranks)
