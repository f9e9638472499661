"""The number of processes of a small run, its layout over them, and its pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from mt_core.config.checks import SPLIT_KEYS, smallest_world
from mt_core.config.parallel import ParallelConfig
from mt_core.parallel.pipeline.partition import expand
from mt_core.parallel.pipeline.schedules import configured_schedule
from mt_core.plugins import PluginHost

LARGEST_WORLD = 8
AXES = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
MANY_BUCKETS = 5000
"""Elements per gradient bucket, small enough that a small model has several."""


def processes(parallel: ParallelConfig) -> int:
    """Ranks of a small run: one copy of the model, or two if copies share work, per distributed optimizer
    instance, as far as LARGEST_WORLD allows."""
    needed = smallest_world(parallel)
    # Two copies at least, so that a mistake in the reduction of gradients shows.
    return needed * min(2 * parallel.num_distributed_optimizer_instances, LARGEST_WORLD // needed)


def copies(parallel: ParallelConfig, world: int) -> int:
    """Number of copies of the model on `world` processes."""
    model = parallel.tensor_model_parallel_size * parallel.context_parallel_size * parallel.pipeline_model_parallel_size
    return world // model


def shrink_axes(parallel: ParallelConfig) -> ParallelConfig:
    """The same axes, the widest halved until the model fits on LARGEST_WORLD processes. None becomes 1."""
    small = _fitting(parallel)
    changes: dict[str, Any] = {"ddp_bucket_size": MANY_BUCKETS}
    if small.hierarchical_context_parallel_sizes is not None:
        # An inner axis of 2, so that both kinds of communication take place.
        size = small.context_parallel_size
        changes["hierarchical_context_parallel_sizes"] = (2, size // 2) if size % 2 == 0 else (1, size)
    instances = min(small.num_distributed_optimizer_instances, 2)
    kept = small.model_copy(update={"num_distributed_optimizer_instances": instances})
    changes["num_distributed_optimizer_instances"] = instances if _shares_within_instances(kept) else 1
    return small.model_copy(update=changes)


def _fitting(parallel: ParallelConfig) -> ParallelConfig:
    while smallest_world(parallel) > LARGEST_WORLD:
        sizes = {axis: getattr(parallel, axis) or 1 for axis in AXES}
        widest = max(sizes, key=lambda axis: sizes[axis])
        # Rounded up: an axis of 3 becomes 2, and none that was used becomes 1 while another is wider.
        parallel = parallel.model_copy(update={widest: (sizes[widest] + 1) // 2})
    return parallel


def _shares_within_instances(parallel: ParallelConfig) -> bool:
    """Whether each distributed optimizer instance has at least two ranks to shard its state."""
    count, stages = parallel.num_distributed_optimizer_instances, parallel.pipeline_model_parallel_size
    expert_tp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    ranks_of_stage = processes(parallel) // stages
    copies = ranks_of_stage // parallel.tensor_model_parallel_size
    copies_of_experts = ranks_of_stage // (parallel.expert_model_parallel_size * expert_tp)
    return copies % count == 0 and copies_of_experts % count == 0 and copies // count >= 2


def ranks_with_own_heads(parallel: ParallelConfig) -> int:
    """Ranks with different heads: tensor-parallel ranks, times context-parallel ranks between which an all-to-all
    exchanges heads."""
    inner = {"a2a": parallel.context_parallel_size}
    if parallel.hierarchical_context_parallel_sizes is not None:
        inner["a2a+p2p"] = parallel.hierarchical_context_parallel_sizes[0]
    return parallel.tensor_model_parallel_size * inner.get(parallel.cp_comm_type, 1)


@dataclass(frozen=True)
class Divisors:
    """What the sizes of a small model are multiples of, so that each of several layouts can divide it.

    own_heads: ranks with different heads. sequence: tensor- times context-parallel ranks. stages: the most of any.
    """

    tensor: int
    own_heads: int
    sequence: int
    experts: int
    stages: int

    @classmethod
    def of(cls, layouts: Sequence[ParallelConfig]) -> Divisors:
        return cls(
            tensor=math.lcm(*(each.tensor_model_parallel_size for each in layouts)),
            own_heads=math.lcm(*map(ranks_with_own_heads, layouts)),
            sequence=math.lcm(*(each.tensor_model_parallel_size * each.context_parallel_size for each in layouts)),
            experts=math.lcm(*(each.expert_model_parallel_size for each in layouts)),
            stages=max(each.pipeline_model_parallel_size for each in layouts),
        )


# -- pipeline stages: fewer, with fewer layers, as uneven as configured ------------------------------

LAYOUT, VIRTUAL = "pipeline_model_parallel_layout", "virtual_pipeline_model_parallel_size"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
MOST_LEVELS = 3


@dataclass(frozen=True)
class Division:
    """num_layers: of the model. keys: of [parallel] that say how stages share them, as far as they change."""

    num_layers: int
    keys: Mapping[str, Any] = field(default_factory=dict)


def shrink_stages(parallel: ParallelConfig, num_layers: int, ranks: int, host: PluginHost) -> Division:
    """The stages of `parallel` over fewer ranks, at most two stages per rank.

    A stage without layers stays so, and one with more than another keeps more, by one layer. parallel: a layout that
    divides num_layers layers. ranks: 2 or more where it had more than one.
    """
    if parallel.pipeline_model_parallel_size == 1:
        return Division(min(num_layers, max(2, parallel.virtual_pipeline_model_parallel_size or 0)))
    each = min(_stages_of_rank(parallel, host), 2)
    virtual = {} if parallel.virtual_pipeline_model_parallel_size is None else {VIRTUAL: each}
    small = _divided(parallel, num_layers, ranks, each, host)
    return Division(small.num_layers, {**virtual, **small.keys})


def forget_division(parallel: ParallelConfig) -> ParallelConfig:
    """Stages balanced by cost, for models whose stages are not a row of equal layers."""
    plain = ParallelConfig()
    return parallel.model_copy(update={key: getattr(plain, key) for key in (LAYOUT, *SPLIT_KEYS)})


def _stages_of_rank(parallel: ParallelConfig, host: PluginHost) -> int:
    least = configured_schedule(parallel, host).min_stages_per_rank
    return parallel.virtual_pipeline_model_parallel_size or least


def _divided(parallel: ParallelConfig, num_layers: int, ranks: int, each: int, host: PluginHost) -> Division:
    if parallel.pipeline_model_parallel_layout is not None:
        layout = shrink_layout(parallel.pipeline_model_parallel_layout, ranks * each)
        return Division(layout.count("t"), {LAYOUT: layout})
    if parallel.num_layers_in_first_pipeline_stage or parallel.num_layers_in_last_pipeline_stage:
        return _uneven_ends(parallel, num_layers, ranks, each)
    counted = parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split
    if counted:
        stages = parallel.pipeline_model_parallel_size * _stages_of_rank(parallel, host)
        of_stage = min((num_layers + counted) // stages, 2)  # embedding and loss count as layers
        return Division(of_stage * ranks * each - counted)
    of_rank = 2 if parallel.virtual_pipeline_model_parallel_size is None else each
    return Division(min(num_layers, ranks * of_rank))


def _uneven_ends(parallel: ParallelConfig, num_layers: int, ranks: int, each: int) -> Division:
    """Numbers of layers of the first and the last rank, if they differ from the others'."""
    ends = {key: count for key in (FIRST, LAST) if (count := getattr(parallel, key)) is not None}
    others = parallel.pipeline_model_parallel_size - len(ends)
    middle = (num_layers - sum(ends.values())) // others if others else 0  # layers of each other rank
    # first 3, last 5, middle 8: levels 1, 2, 3. The order stays, the numbers shrink.
    level = _levels([*ends.values(), middle])
    keys = {key: level[count] * each for key, count in ends.items()}
    return Division(sum(keys.values()) + (ranks - len(ends)) * level[middle] * each, keys)


def shrink_layout(layout: str, count: int) -> str:
    """A layout string (see parallel.pipeline.layout_string) for `count` stages.

    The first and the last stage are not merged if there are more than two; neighbours between them are.
    """
    stages = _joined(expand(layout).split("|"), count)
    level = _levels(stage.count("t") for stage in stages)
    return "|".join(_written(stage, level[stage.count("t")]) for stage in stages)


def _joined(stages: Sequence[str], count: int) -> list[str]:
    ends = 1 if count > 2 else 0
    middle, groups = stages[ends : len(stages) - ends], count - 2 * ends
    # Groups of neighbours, of sizes that differ by one at most.
    cuts = [group * len(middle) // groups for group in range(groups + 1)]
    joined = [_one(middle[start:end]) for start, end in pairwise(cuts)]
    return [*stages[:ends], *joined, *stages[len(stages) - ends :]]


def _one(stages: Sequence[str]) -> str:
    """Merges several stages: their embedding, MTP blocks and loss, and the largest number of layers of any of them.

    Not the sum of layers: equal stages would become unequal when they are merged by twos and threes.
    """
    return _written("".join(stages), max(stage.count("t") for stage in stages))


def _written(stage: str, layers: int) -> str:
    return "E" * stage.count("E") + "t" * layers + "m" * stage.count("m") + "L" * stage.count("L")


def _levels(counts: Iterable[int]) -> dict[int, int]:
    """Number of layers -> its rank among the distinct numbers: 1 for the smallest, 0 for none."""
    places = {count: min(place, MOST_LEVELS) for place, count in enumerate(sorted({*counts} - {0}), start=1)}
    return {0: 0, **places}
