"""The items of a distributed checkpoint: chunks of tensors and pickled objects, distributed over data files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mt_ckpt.megatron.names import EXPERTS, EXTRA_STATE, MTP, POSITION_DUPLICATES, Style, duplicates, layer_counts
from mt_ckpt.megatron.optimizer import MAIN, STEP
from mt_ckpt.megatron.rank_plan import is_linear
from mt_ckpt.megatron.target import Plan
from mt_ckpt.megatron.versions import shown
from mt_ckpt.megatron_dist.flat_plan import DP_RESHARDABLE, PLAIN, FlatItem, FlatRankPlan, flat_plans
from mt_ckpt.megatron_dist.index import WrittenTensor
from mt_ckpt.megatron_dist.keys import Place, Rows, are_alike, place_of, require_one_rank, rows_of, whole
from mt_core.parallel.context import ParallelContext

STATE_KEYS = {MAIN: "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
PLAIN_STATE_KEYS = {**STATE_KEYS, MAIN: "fp32_param"}
ATTENTION_OUTPUT = "linear_proj"
HEADS: Mapping[str, tuple[str, ...]] = {
    "bert": ("output_layer",),
    "t5": ("lm_head.output_layer", "output_layer"),
    "mamba": ("output_layer",),
    "hybrid": ("output_layer",),
}
"""Family -> layers outside of the stacks whose (empty) FP8 states its model looks for; a GPT's drops its own."""


@dataclass(frozen=True)
class Source:
    """A canonical tensor. state: of the optimizer; None: the weights."""

    name: str
    state: str | None


@dataclass(frozen=True)
class ChunkItem:
    """One chunk: the part of `source` with the number `expert`, or some of its rows, at `offsets` of the tensor
    `key`. rank: it is the part of this rank instead, of one of the rank's experts if `expert` is given, laid out flat,
    with zeros behind it."""

    key: str
    source: Source
    expert: int | None
    rows: Rows
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    num_bytes: int
    rank: ParallelContext | None = None


@dataclass(frozen=True)
class DistPlan:
    """objects: key -> what is pickled, in a list of one."""

    tensors: dict[str, WrittenTensor]
    chunks: list[ChunkItem]
    objects: dict[str, Any]


def dist_plan(plan: Plan, optimizer_format: str) -> DistPlan:
    """Layers that are all alike are stacked; a chunk is a layer's tensor, or an expert's.

    optimizer_format: of the optimizer's state, `flat_plan.DP_RESHARDABLE`, `FULLY_RESHARDABLE` or `PLAIN`.
    """
    if not plan.version.mixer_sections:
        require_one_rank(plan.layouts, plan.target.grid.tp, shown(plan.version.version))
    # A hybrid model's layers are of different kinds, so that each has keys with its number.
    stacked = not plan.hybrid and are_alike(plan.layouts)
    # Flat buckets belong to ranks, not to parameters: they are added once, by `_add_flat`.
    flat = plan.states and optimizer_format == DP_RESHARDABLE
    plain = optimizer_format == PLAIN
    state_keys = PLAIN_STATE_KEYS if plain else STATE_KEYS
    style, counts = plan.dist_style(), layer_counts(plan.layouts)
    tensors: dict[str, WrittenTensor] = {}
    chunks: list[ChunkItem] = []
    for name, layout in plan.layouts.items():
        place = place_of(name, style, stacked=stacked)
        # The size of the leading dimension of a stacked tensor: the layers of its stack.
        front = (counts[name.split(".")[0]],) if place.layer is not None else ()
        # The weights first, then the states. Chunks of one tensor have to follow one another, so that the writer reads
        # it once.
        for state in (None, *(() if flat else _states(plan, name, plain=plain))):
            prefix = "" if state is None else f"optimizer.state.{state_keys[state]}."
            dtype = torch.float32 if state is not None else plan.source.dtypes()[f"model.{name}"]
            for rows in rows_of(name, layout) if plan.version.mixer_sections else [whole(layout)]:
                key = f"{prefix}{place.key}" + (f".{rows.section}" if rows.section else "")
                shape = (rows.count, *layout.shape[1:]) if rows.section else layout.shape
                tensors[key] = WrittenTensor((*front, *shape), dtype)
                chunks += _chunks(key, Source(name, state), place, shape, rows, dtype)
    planned = DistPlan(tensors, chunks, dict.fromkeys(_extra_states(plan, style, stacked, counts)))
    _add_duplicates(planned, plan)
    if flat:
        _add_flat(planned, list(flat_plans(plan)))
    return planned


def _add_duplicates(planned: DistPlan, plan: Plan) -> None:
    """What T5 has under two names is two tensors. The optimizer's state of it is one, under the later name."""
    if plan.config.model.family != "t5":
        return
    for again, once in duplicates(plan.version, distributed=True).items():
        # Over a copy, since chunks are appended to the list.
        for number, chunk in enumerate(planned.chunks[:]):
            if chunk.source.name != once:
                continue
            copy = replace(chunk, key=chunk.key.replace(once, again))
            if chunk.source.state is None:
                planned.tensors[copy.key] = planned.tensors[chunk.key]
                planned.chunks.append(copy)
            elif again in POSITION_DUPLICATES:
                planned.tensors[copy.key] = planned.tensors.pop(chunk.key)
                planned.chunks[number] = copy


def _add_flat(planned: DistPlan, ranks: Sequence[FlatRankPlan]) -> None:
    """Parts of one tensor follow one another, of all ranks and experts, so that it is read once."""
    for rank in ranks:
        planned.tensors.update({key: WrittenTensor((numel,), torch.float32) for key, numel in rank.sizes.items()})
        planned.objects.update(rank.objects)
    chunks = [_flat_chunk(item) for rank in ranks for item in rank.items]
    planned.chunks.extend(sorted(chunks, key=lambda chunk: (chunk.source.name, chunk.source.state)))


def _flat_chunk(item: FlatItem) -> ChunkItem:
    source, rows, size = Source(item.name, item.state), Rows(None, 0, 0), item.numel * torch.float32.itemsize
    return ChunkItem(item.key, source, item.expert, rows, (item.first,), (item.numel,), size, item.rank)


def _states(plan: Plan, name: str, *, plain: bool) -> tuple[str, ...]:
    """The states of a parameter. Megatron's distributed optimizer has fp32 copies of fp32 weights too."""
    if not plan.states or not plan.trained(name):
        return ()
    moments = tuple(state for state in plan.states if state != MAIN)
    return moments if plain and not plan.rounded(name) else (MAIN, *moments)


def _chunks(
    key: str, source: Source, place: Place, shape: tuple[int, ...], rows: Rows, dtype: torch.dtype
) -> Iterator[ChunkItem]:
    # Layer 3, expert 5 of decoder.layers.mlp.experts.experts.linear_fc1.weight, which is [layers, experts, rows,
    # columns]: offsets (3, 5, 0, 0), sizes (1, 1, rows, columns).
    front = () if place.layer is None else (place.layer,)
    ones = (1,) * len(front)
    if EXPERTS not in source.name:
        size = math.prod(shape) * dtype.itemsize
        yield ChunkItem(key, source, None, rows, (*front, *(0 for _ in shape)), (*ones, *shape), size)
        return
    for expert in range(shape[0]):
        offsets = (*front, expert, *(0 for _ in shape[1:]))
        size = math.prod(shape[1:]) * dtype.itemsize
        yield ChunkItem(key, source, expert, rows, offsets, (*ones, 1, *shape[1:]), size)


def _extra_states(plan: Plan, style: Style, stacked: bool, counts: Mapping[str, int]) -> Iterator[str]:
    """Keys of the (empty) FP8 states that Megatron's linear layers have, a shard for each layer and expert."""
    seen = set()
    for name, layout in plan.layouts.items():
        module, _, _ = name.rpartition(".")
        if not is_linear(module) or module == "output_layer" or module in seen:
            continue
        seen.add(module)
        experts = layout.shape[0] if EXPERTS in name else 0
        yield from _state_shards(place_of(f"{module}.{EXTRA_STATE}", style, stacked=stacked), counts, experts)
        stem, _, leaf = module.rpartition(".")
        if leaf == ATTENTION_OUTPUT and _has_attention_state(plan, module):
            state = f"{stem}.core_attention.{EXTRA_STATE}"
            yield from _state_shards(place_of(state, style, stacked=stacked), counts, 0)
    family = plan.config.model.family
    for layer in HEADS.get(family, ()) if family != "t5" or plan.version.output_bias_twice else ():
        yield f"{layer}.{EXTRA_STATE}/shard_0_1"


def _has_attention_state(plan: Plan, module: str) -> bool:
    version = plan.version
    in_version = version.prediction_attention_state if module.startswith(MTP) else version.attention_state
    return in_version and not plan.local


def _state_shards(place: Place, counts: Mapping[str, int], experts: int) -> Iterator[str]:
    layers = [(place.layer, counts[place.key.split(".")[0]])] if place.layer is not None else []
    for expert in range(max(experts, 1)):
        axes = [*layers, *([(expert, experts)] if experts else [])] or [(0, 1)]
        offsets, sizes = (".".join(str(axis[i]) for axis in axes) for i in (0, 1))
        # The key of a ShardedObject in Megatron-Core: <key>/shard_<offsets>_<sizes of the grid>.
        yield f"{place.key}/shard_{offsets}_{sizes}"


def split_by_bytes(chunks: list[ChunkItem], max_bytes: int) -> list[list[ChunkItem]]:
    """Consecutive chunks for each data file, at most `max_bytes` each unless one chunk alone is larger."""
    groups: list[list[ChunkItem]] = [[]]
    room = max_bytes
    for chunk in chunks:
        if groups[-1] and chunk.num_bytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(chunk)
        room -= chunk.num_bytes
    return groups


def _plain_optimizer(groups: list[dict[str, Any]], *, wrapped: bool) -> dict[str, Any]:
    """torch's state dictionary without the states of parameters. wrapped: in that of mixed precision."""
    # torch's Adam counts steps for each parameter, which is common_step here; fused ones count in their groups.
    inner = {"state": {"common_step": groups[0][STEP]}, "param_groups": groups}
    return {"optimizer": inner} if wrapped else inner


def common_optimizer(groups: list[dict[str, Any]], optimizer_format: str, *, mixed_precision: bool) -> dict[Any, Any]:
    """The part of the common state that says how the optimizer's state is stored, and names the groups where that is
    in the tensors `optimizer.state.*`."""
    # Without buckets the groups are here; with them they are objects of each rank, see `flat_plan`.
    kinds = [[g for g in groups if g["is_expert_parallel"] == of_experts] for of_experts in (False, True)]
    flat = optimizer_format == DP_RESHARDABLE
    made_of = [
        {**({} if flat else {"optimizer": {"param_groups": kind}}), "param_state_sharding_type": optimizer_format}
        if optimizer_format != PLAIN
        else _plain_optimizer(kind, wrapped=mixed_precision)
        for kind in kinds
        if kind
    ]
    # A ChainedOptimizer's state: its optimizers by number.
    return made_of[0] if len(made_of) == 1 else dict(enumerate(made_of))
