"""The optimizer's state as flat buckets (`dp_reshardable`, Megatron's default) in a written checkpoint.

Each rank of tensor and pipeline parallelism has separate buckets, so what is written is specific to the layout that was
requested; only the number of data-parallel ranks is free. With expert parallel ranks the experts have an optimizer of
their own, with buckets for each rank of expert tensor, expert and pipeline parallelism. `reshardable` reads the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mt_ckpt.megatron.arguments import Arguments
from mt_ckpt.megatron.flat_buffers import Bucket, Bucketing, bucketing, buckets_of, padded_numel
from mt_ckpt.megatron.optimizer import FLAT_STATES
from mt_ckpt.megatron.rank_plan import RankEntry
from mt_ckpt.megatron.save import part_entries
from mt_ckpt.megatron.target import Plan
from mt_ckpt.megatron.write_optimizer import belongs, buffer_dtypes, flat_parameters, optimizer_groups
from mt_core.parallel.context import ParallelContext

DP_RESHARDABLE, FULLY_RESHARDABLE, PLAIN = "dp_reshardable", "fully_reshardable", "plain"
"""Layouts of the optimizer's state, the first two by Megatron's words. Plain: of one that is not distributed."""


@dataclass(frozen=True)
class FlatItem:
    """`numel` elements of the bucket `key` from `first` on: a rank's part of a state of `name`, zeros behind it.

    expert: only the part of this one of the rank's experts.
    """

    key: str
    name: str
    state: str
    rank: ParallelContext
    first: int
    numel: int
    expert: int | None


@dataclass(frozen=True)
class FlatRankPlan:
    """What one rank of an optimizer writes. sizes: bucket -> elements. objects: key -> what is pickled."""

    sizes: Mapping[str, int]
    items: list[FlatItem]
    objects: Mapping[str, Any]


@dataclass(frozen=True)
class _Owner:
    """The optimizer of the experts, or the other one, of the rank `rank` of a stage. group: its number over all stages.

    Megatron puts the optimizer's number before the keys where there are two.
    """

    stage: int
    rank: ParallelContext
    group: int
    of_experts: bool
    chained: bool

    @property
    def prefix(self) -> str:
        chain = f"chained_{int(self.of_experts)}." if self.chained else ""
        return f"{chain}optimizer.distributed.dp_group_idx_{self.group}."


def flat_plans(plan: Plan) -> Iterator[FlatRankPlan]:
    """Buffers of all ranks, dense optimizers and those of experts."""
    for stage in range(plan.target.pipeline.stages):
        # Virtual pipeline stages are model parts, each with a buffer of its own.
        parts = [part_entries(plan, stage, part) for part in range(plan.target.pipeline.parts)]
        for owner in _owners(plan, stage):
            yield _rank_plan(plan, owner, parts)


def _owners(plan: Plan, stage: int) -> Iterator[_Owner]:
    grid, apart = plan.target.grid, plan.experts_apart
    # Megatron's dp_group_idx counts the groups of ranks with equal parameters: tensor ranks of stage 0, of stage 1, ...
    for number in range(grid.tp):
        rank = grid.context(grid.place_of_tensor_rank(number))
        yield _Owner(stage, rank, stage * grid.tp + number, of_experts=False, chained=apart)
    experts = grid.ep * grid.etp
    for number in range(experts if apart else 0):
        rank = grid.context(grid.place_of_expert_rank(number))
        yield _Owner(stage, rank, stage * experts + number, of_experts=True, chained=apart)


def _rank_plan(plan: Plan, owner: _Owner, parts: Sequence[Sequence[RankEntry]]) -> FlatRankPlan:
    dtypes = buffer_dtypes(plan)
    # Empty buffers have no number: an optimizer of experts may have none in the first part.
    buffers = [buffer for part, entries in enumerate(parts) if (buffer := _buffer(plan, owner, part, entries)).buckets]
    sizes: dict[str, int] = {}
    items: list[FlatItem] = []
    for index, buffer in enumerate(buffers):
        for number, bucket in enumerate(buffer.buckets):
            key = f"{owner.prefix}gbuf_idx_{index}.dtype_{_shown(dtypes)}.bucket_idx_{number}."
            for stored, state in FLAT_STATES.items():
                sizes[key + stored] = bucket.numel
                items += _items(key + stored, bucket, state, owner.rank, buffer.members)
    objects = {
        "optimizer": {"param_groups": _groups(plan, owner.of_experts)},
        "per_bucket_numel": [{dtypes: [padded_numel(b, buffer.cut) for b in buffer.buckets]} for buffer in buffers],
        "per_bucket_numel_unpadded": [{dtypes: [bucket.numel for bucket in buffer.buckets]} for buffer in buffers],
    }
    return FlatRankPlan(sizes, items, {f"{owner.prefix}{key}/shard_0_1": value for key, value in objects.items()})


@dataclass(frozen=True)
class _Buffer:
    """What an optimizer has of one model part. members: by their stored names."""

    members: Mapping[str, RankEntry]
    cut: Bucketing
    buckets: list[Bucket]


def _buffer(plan: Plan, owner: _Owner, part: int, entries: Sequence[RankEntry]) -> _Buffer:
    members = {entry.stored: entry for entry in entries if belongs(plan, entry, owner.of_experts)}
    # Paths appear in messages only; no file of this name exists.
    args = Arguments(plan.args, Path(DP_RESHARDABLE))
    cut = bucketing(args, owner.stage, part, of_experts=owner.of_experts)
    return _Buffer(members, cut, buckets_of(flat_parameters(plan, owner.rank, list(members.values())), cut))


def _shown(dtypes: tuple[torch.dtype, torch.dtype]) -> str:
    return f"({dtypes[0]}, {dtypes[1]})"


def _items(
    key: str, bucket: Bucket, state: str, rank: ParallelContext, members: Mapping[str, RankEntry]
) -> Iterator[FlatItem]:
    # Each item reaches to the next parameter, so that items cover the gaps of alignment too: DCP refuses a tensor whose
    # chunks do not cover it.
    ends = [*list(bucket.first.values())[1:], bucket.numel]
    for (stored, first), end in zip(bucket.first.items(), ends, strict=True):
        entry = members[stored]
        yield FlatItem(key, entry.name, state, rank, first, end - first, entry.expert)


def _groups(plan: Plan, of_experts: bool) -> list[dict[str, Any]]:
    """Buffers of all stages, as Megatron makes them the same on every rank."""
    groups = optimizer_groups(plan.layouts, plan.optimizer, plan.step(), experts_apart=plan.experts_apart)
    return [group for group in groups if group["is_expert_parallel"] == of_experts]
