"""The items of a distributed checkpoint: chunks of tensors and pickled objects, divided over data files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mt_ckpt.megatron.names import EXTRA_STATE, layer_of
from mt_ckpt.megatron.optimizer import MAIN
from mt_ckpt.megatron.target import Plan
from mt_ckpt.megatron_dist.keys import Place, are_alike, place_of
from mt_ckpt.megatron_dist.write_index import WrittenTensor

STATE_KEYS = {MAIN: "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_EXPERTS = ".mlp.experts."


@dataclass(frozen=True)
class Source:
    """A canonical tensor. state: of the optimizer; None: the weights."""

    name: str
    state: str | None


@dataclass(frozen=True)
class ChunkItem:
    """One chunk: the part of `source` with the number `expert`, or all of it, at `offsets` of the tensor `key`."""

    key: str
    source: Source
    expert: int | None
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class DistPlan:
    tensors: dict[str, WrittenTensor]
    chunks: list[ChunkItem]
    objects: list[str]


def dist_plan(made: Plan) -> DistPlan:
    """Layers that are all alike are stacked; a chunk is a layer's tensor, or an expert's."""
    stacked = are_alike(made.layouts)
    counts = _layer_counts(made)
    tensors: dict[str, WrittenTensor] = {}
    chunks: list[ChunkItem] = []
    for name, layout in made.layouts.items():
        place = place_of(name, stacked=stacked, keep_norm=made.fused and _has_experts(name, made))
        for state in (None, *(_states(made) if made.trained(name) else ())):
            key = place.key if state is None else f"optimizer.state.{STATE_KEYS[state]}.{place.key}"
            dtype = torch.float32 if state is not None else made.source.dtypes()[f"model.{name}"]
            front = (counts[name.split(".")[0]],) if place.layer is not None else ()
            tensors[key] = WrittenTensor((*front, *layout.shape), dtype)
            chunks += _chunks(key, Source(name, state), place, layout.shape, dtype)
    return DistPlan(tensors, chunks, list(_extra_states(made, stacked, counts)))


def _states(made: Plan) -> tuple[str, ...]:
    """The fp32 copies are written of fp32 weights too, as Megatron's distributed optimizer does."""
    return (MAIN, *(state for state in made.states if state != MAIN)) if made.states else ()


def _chunks(key: str, source: Source, place: Place, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[ChunkItem]:
    front = () if place.layer is None else (place.layer,)
    ones = (1,) * len(front)
    if _EXPERTS not in source.name:
        size = math.prod(shape) * dtype.itemsize
        yield ChunkItem(key, source, None, (*front, *(0 for _ in shape)), (*ones, *shape), size)
        return
    for expert in range(shape[0]):
        offsets = (*front, expert, *(0 for _ in shape[1:]))
        yield ChunkItem(key, source, expert, offsets, (*ones, 1, *shape[1:]), math.prod(shape[1:]) * dtype.itemsize)


def _extra_states(made: Plan, stacked: bool, counts: dict[str, int]) -> Iterator[str]:
    """Keys of the (empty) FP8 states that Megatron's linear layers have, a shard for each layer and expert."""
    seen = set()
    for name, layout in made.layouts.items():
        module, _, _ = name.rpartition(".")
        if not module.rpartition(".")[2].startswith("linear_") or module in seen:
            continue
        seen.add(module)
        place = place_of(f"{module}.{EXTRA_STATE}", stacked=stacked)
        layers = [(place.layer, counts[name.split(".")[0]])] if place.layer is not None else []
        experts = layout.shape[0] if _EXPERTS in name else 0
        for expert in range(max(experts, 1)):
            axes = [*layers, *([(expert, experts)] if experts else [])] or [(0, 1)]
            offsets, sizes = (".".join(str(axis[i]) for axis in axes) for i in (0, 1))
            yield f"{place.key}/shard_{offsets}_{sizes}"
    if made.config.model.family == "bert":
        yield f"output_layer.{EXTRA_STATE}/shard_0_1"


def _layer_counts(made: Plan) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in made.layouts:
        if found := layer_of(name):
            counts[found[0]] = max(counts.get(found[0], 0), found[1] + 1)
    return counts


def _has_experts(name: str, made: Plan) -> bool:
    found = layer_of(name)
    return found is not None and found[1] in made.layers_with_experts


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


def common_optimizer(groups: list[dict[str, Any]]) -> dict[Any, Any]:
    """The part of the common state that names the groups; their state is in the tensors `optimizer.state.*`."""
    kinds = [[g for g in groups if g["is_expert_parallel"] == of_experts] for of_experts in (False, True)]
    made_of = [
        {"optimizer": {"param_groups": kind}, "param_state_sharding_type": "fully_reshardable"}
        for kind in kinds
        if kind
    ]
    return made_of[0] if len(made_of) == 1 else dict(enumerate(made_of))
