"""The items of a distributed checkpoint: chunks of tensors and pickled objects, divided over data files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mt_ckpt.megatron.names import EXPERTS, EXTRA_STATE, Style, layer_counts
from mt_ckpt.megatron.optimizer import MAIN
from mt_ckpt.megatron.rank_plan import is_linear
from mt_ckpt.megatron.target import Plan
from mt_ckpt.megatron_dist.keys import Place, are_alike, place_of
from mt_ckpt.megatron_dist.sections import Rows, rows_of
from mt_ckpt.megatron_dist.write_index import WrittenTensor

STATE_KEYS = {MAIN: "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@dataclass(frozen=True)
class Source:
    """A canonical tensor. state: of the optimizer; None: the weights."""

    name: str
    state: str | None


@dataclass(frozen=True)
class ChunkItem:
    """One chunk: the part of `source` with the number `expert`, or some of its rows, at `offsets` of the tensor
    `key`."""

    key: str
    source: Source
    expert: int | None
    rows: Rows
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
    stacked = not made.args["is_hybrid_model"] and are_alike(made.layouts)
    style, counts = _style(made), layer_counts(made.layouts)
    tensors: dict[str, WrittenTensor] = {}
    chunks: list[ChunkItem] = []
    for name, layout in made.layouts.items():
        place = place_of(name, style, stacked=stacked)
        front = (counts[name.split(".")[0]],) if place.layer is not None else ()
        for state in (None, *(_states(made) if made.trained(name) else ())):
            prefix = "" if state is None else f"optimizer.state.{STATE_KEYS[state]}."
            dtype = torch.float32 if state is not None else made.source.dtypes()[f"model.{name}"]
            for rows in rows_of(name, layout):
                key = f"{prefix}{place.key}" + (f".{rows.section}" if rows.section else "")
                shape = (rows.count, *layout.shape[1:]) if rows.section else layout.shape
                tensors[key] = WrittenTensor((*front, *shape), dtype)
                chunks += _chunks(key, Source(name, state), place, shape, rows, dtype)
    return DistPlan(tensors, chunks, list(_extra_states(made, style, stacked, counts)))


def _style(made: Plan) -> Style:
    """Keys are Transformer Engine's, whatever the layers; but those of latent attention have no such mapping."""
    if not made.local:
        return made.style("beside")
    return made.style("never" if made.args["multi_latent_attention"] else "always")


def _states(made: Plan) -> tuple[str, ...]:
    """The fp32 copies are written of fp32 weights too, as Megatron's distributed optimizer does."""
    return (MAIN, *(state for state in made.states if state != MAIN)) if made.states else ()


def _chunks(
    key: str, source: Source, place: Place, shape: tuple[int, ...], rows: Rows, dtype: torch.dtype
) -> Iterator[ChunkItem]:
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


def _extra_states(made: Plan, style: Style, stacked: bool, counts: Mapping[str, int]) -> Iterator[str]:
    """Keys of the (empty) FP8 states that Megatron's linear layers have, a shard for each layer and expert."""
    seen = set()
    for name, layout in made.layouts.items():
        module, _, _ = name.rpartition(".")
        if not is_linear(module) or module == "output_layer" or module in seen:
            continue
        seen.add(module)
        place = place_of(f"{module}.{EXTRA_STATE}", style, stacked=stacked)
        layers = [(place.layer, counts[name.split(".")[0]])] if place.layer is not None else []
        experts = layout.shape[0] if EXPERTS in name else 0
        for expert in range(max(experts, 1)):
            axes = [*layers, *([(expert, experts)] if experts else [])] or [(0, 1)]
            offsets, sizes = (".".join(str(axis[i]) for axis in axes) for i in (0, 1))
            yield f"{place.key}/shard_{offsets}_{sizes}"
    if made.config.model.family == "bert":
        yield f"output_layer.{EXTRA_STATE}/shard_0_1"


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
