"""The optimizer's state as flat buckets (`dp_reshardable`, Megatron's default) in a written checkpoint.

Each rank of tensor and pipeline parallelism has separate buckets, so what is written is specific to the layout that was
asked for; only the number of data-parallel ranks is free. `reshardable` reads the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mt_ckpt.megatron.arguments import Arguments
from mt_ckpt.megatron.flat_buffers import (
    Bucket,
    Bucketing,
    FlatParameter,
    bucketing,
    buckets_of,
    padded_numel,
    shared_matrices,
)
from mt_ckpt.megatron.names import EXPERTS
from mt_ckpt.megatron.optimizer import FLAT_STATES
from mt_ckpt.megatron.order import in_order
from mt_ckpt.megatron.target import Plan
from mt_ckpt.megatron.write_flat import buffer_dtypes
from mt_ckpt.megatron.write_optimizer import optimizer_groups
from mt_core.errors import ConfigError
from mt_core.parallel.context import ParallelContext

DP_RESHARDABLE, FULLY_RESHARDABLE = "dp_reshardable", "fully_reshardable"


@dataclass(frozen=True)
class FlatItem:
    """`numel` elements of the bucket `key` from `first` on: a rank's part of a state of `name`, zeros behind it."""

    key: str
    name: str
    state: str
    rank: ParallelContext
    first: int
    numel: int


@dataclass(frozen=True)
class FlatRankPlan:
    """Of one rank of tensor and pipeline parallelism. sizes: bucket -> elements. objects: key -> what is pickled."""

    sizes: Mapping[str, int]
    items: list[FlatItem]
    objects: Mapping[str, Any]


def flat_plans(made: Plan) -> Iterator[FlatRankPlan]:
    """Raises ConfigError for a model whose buckets do not say which are the experts'."""
    if any(EXPERTS in name for name in made.layouts):
        raise ConfigError(
            f"--target-optimizer-format {DP_RESHARDABLE}: the buckets of a model with experts do not say which are the "
            f"experts'; it can be {FULLY_RESHARDABLE}"
        )
    grid, pipeline = made.target.grid, made.target.pipeline
    for stage in range(pipeline.stages):
        for place in grid.places():
            yield _rank_plan(made, stage, grid.context(place), stage * grid.tp + place["tp"])


def _rank_plan(made: Plan, stage: int, rank: ParallelContext, group: int) -> FlatRankPlan:
    sizes: dict[str, int] = {}
    items: list[FlatItem] = []
    padded: list[dict[Any, list[int]]] = []
    unpadded: list[dict[Any, list[int]]] = []
    dtypes = buffer_dtypes(made)
    for part in range(made.target.pipeline.parts):
        cut, buckets = _buckets(made, stage, part, rank)
        for number, bucket in enumerate(buckets):
            key = f"{_prefix(group)}gbuf_idx_{part}.dtype_{_shown(dtypes)}.bucket_idx_{number}."
            for stored, state in FLAT_STATES.items():
                sizes[key + stored] = bucket.numel
                items += _items(key + stored, bucket, state, rank)
        padded.append({dtypes: [padded_numel(bucket, cut) for bucket in buckets]})
        unpadded.append({dtypes: [bucket.numel for bucket in buckets]})
    objects = {
        "optimizer": {"param_groups": _groups(made, stage)},
        "per_bucket_numel": padded,
        "per_bucket_numel_unpadded": unpadded,
    }
    return FlatRankPlan(sizes, items, {f"{_prefix(group)}{key}/shard_0_1": value for key, value in objects.items()})


def _prefix(group: int) -> str:
    return f"optimizer.distributed.dp_group_idx_{group}."


def _shown(dtypes: tuple[torch.dtype, torch.dtype]) -> str:
    return f"({dtypes[0]}, {dtypes[1]})"


def _members(made: Plan, stage: int, part: int) -> list[str]:
    run = made.runs[made.target.pipeline.run(stage, part)]
    return in_order((name for name in run if made.trained(name)), made.torch_style())


def _buckets(made: Plan, stage: int, part: int, rank: ParallelContext) -> tuple[Bucketing, list[Bucket]]:
    args = Arguments(made.args, Path(DP_RESHARDABLE))
    shared, cut = shared_matrices(args), bucketing(args, stage, part)
    sizes = {name: math.prod(made.layout_of(name).local_shape(rank)) for name in _members(made, stage, part)}
    return cut, buckets_of([FlatParameter(name, size, name in shared) for name, size in sizes.items()], cut)


def _items(key: str, bucket: Bucket, state: str, rank: ParallelContext) -> Iterator[FlatItem]:
    ends = [*list(bucket.first.values())[1:], bucket.numel]
    for (name, first), end in zip(bucket.first.items(), ends, strict=True):
        yield FlatItem(key, name, state, rank, first, end - first)


def _groups(made: Plan, stage: int) -> list[dict[str, Any]]:
    """The groups that the stage's parameters are in."""
    parts = range(made.target.pipeline.parts)
    layouts = {name: made.layout_of(name) for part in parts for name in _members(made, stage, part)}
    return optimizer_groups(
        layouts, made.source.metadata["config"].get("optimizer", {}), made.step(), experts_apart=False
    )
