"""The optimizer's state as flat buckets (`dp_reshardable`, Megatron's default), tied to the parameters' names.

Each rank of tensor and pipeline parallelism has separate buckets, which hold what `mt_ckpt.megatron.flat_buffers`
describes. The files do not name the parameters, so their order is that in which Megatron makes them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mt_ckpt.megatron.arguments import Arguments
from mt_ckpt.megatron.cuts import as_written
from mt_ckpt.megatron.flat_buffers import Bucket, FlatParameter, bucketing, buckets_of, shared_matrices
from mt_ckpt.megatron.model import Grid
from mt_ckpt.megatron.names import EMBEDDING, Style, norms_apart, torch_renamed
from mt_ckpt.megatron.optimizer import COMPARED_ELEMENTS, FLAT_STATES
from mt_ckpt.megatron.order import Pipeline, in_order, split_layers
from mt_ckpt.megatron.pieces import Gathered, Held, Piece, choose
from mt_ckpt.megatron_dist.common import newest_that_writes
from mt_ckpt.megatron_dist.index import ChunkedTensor, Index
from mt_core.errors import CheckpointError
from mt_core.nn.layout import ParameterLayout
from mt_core.parallel.context import AxisName

_KEY = re.compile(
    r"^(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.gbuf_idx_(?P<part>\d+)\."
    r"dtype_\(.*?\)\.bucket_idx_(?P<bucket>\d+)\.(?P<state>\w+)$"
)

UNEVEN = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Arguments that give pipeline stages different numbers of layers."""


@dataclass(frozen=True)
class BucketPart:
    """Elements [first, ...) of a bucket, as a tensor of `shape`."""

    bucket: ChunkedTensor
    first: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.bucket.dtype

    def read(self) -> Tensor:
        last = self.first + math.prod(self.shape)
        return self.bucket.read_box((self.first,), (last,)).view(self.shape)


def has_flat_optimizer(index: Index) -> bool:
    return any(_KEY.match(key) for key in index.tensors)


def flat_optimizer(
    index: Index, args: Arguments, layouts: Mapping[str, ParameterLayout], weights: Mapping[str, Piece]
) -> dict[str, dict[str, Piece]]:
    """State -> canonical name -> tensor. Raises CheckpointError when the buckets do not fit the parameters."""
    local = args.get("transformer_impl") == "local"
    version = newest_that_writes(index.folder)
    trained = {name: layout for name, layout in as_written(layouts, version, local=local).items() if layout.trained}
    fused: Literal["never", "beside"] = "never" if local else "beside"
    hybrid = bool(args.get("is_hybrid_model", False))
    style = Style(fused, hybrid, trained, norms_apart(version), torch_renamed(version))
    pipeline = Pipeline(args.pipeline_parallel, 1 + max(part for _, part in _buckets(index)))
    runs = split_layers(trained, pipeline)
    grid = Grid(args.tensor_parallel)
    shared = shared_matrices(args)
    held: dict[str, dict[str, list[Held]]] = {}
    for (group, part), buckets in _buckets(index).items():
        stage, rank = divmod(group, grid.tp)
        members = in_order(runs[pipeline.run(stage, part)], style)
        place: Mapping[AxisName, int] = {"tp": rank, "ep": 0, "etp": 0}
        shapes = {name: _layout(name, trained).local_shape(grid.context(place)) for name in members}
        flat = [FlatParameter(name, math.prod(shape), name in shared) for name, shape in shapes.items()]
        planned = buckets_of(flat, bucketing(args, stage, part))
        _require_sizes(index, group, planned, buckets)
        for bucket, states in zip(planned, buckets, strict=True):
            for name, first in bucket.first.items():
                for stored, state in FLAT_STATES.items():
                    if stored in states and name in trained:  # the copy of the token embeddings is not
                        piece = BucketPart(states[stored], first, shapes[name])
                        held.setdefault(state, {}).setdefault(name, []).append(Held(place, piece))
    found: dict[str, dict[str, Piece]] = {
        state: {name: _gathered(index, name, trained[name], grid, parts) for name, parts in by_name.items()}
        for state, by_name in held.items()
    }
    _require_same_weights(index, found.get("main", {}), weights)
    return found


def reason_not_read(args: Arguments) -> str | None:
    """Why buckets cannot be tied to parameters, of runs where nothing in the files says it; None: they can."""
    if args.get("num_experts", 0):
        return "its flat buckets (dp_reshardable) do not say which are the experts'"
    if args.pipeline_parallel > 1 and any(args.get(name, False) for name in UNEVEN):
        return "its flat buckets (dp_reshardable) belong to pipeline stages that are not alike"
    return None


def _layout(name: str, layouts: Mapping[str, ParameterLayout]) -> ParameterLayout:
    return layouts[name] if name in layouts else layouts[EMBEDDING]


def _buckets(index: Index) -> dict[tuple[int, int], list[dict[str, ChunkedTensor]]]:
    """(rank of tensor and pipeline parallelism, model part) -> for each bucket, state -> flat tensor."""
    found: dict[tuple[int, int], dict[int, dict[str, ChunkedTensor]]] = {}
    for key, tensor in index.tensors.items():
        if match := _KEY.match(key):
            place = found.setdefault((int(match["group"]), int(match["part"])), {})
            place.setdefault(int(match["bucket"]), {})[match["state"]] = tensor
    return {place: [buckets[number] for number in sorted(buckets)] for place, buckets in found.items()}


def _require_sizes(
    index: Index, group: int, planned: Sequence[Bucket], buckets: Sequence[Mapping[str, ChunkedTensor]]
) -> None:
    sizes = [bucket.numel for bucket in planned]
    found = [next(iter(states.values())).shape[0] for states in buckets]
    if sizes != found:
        raise CheckpointError(
            f"{index.folder}: the optimizer's buckets of rank {group} have {found} elements, the model makes {sizes}"
        )


def _gathered(index: Index, name: str, layout: ParameterLayout, grid: Grid, held: Sequence[Held]) -> Gathered:
    pieces = choose(layout, grid, held)
    if pieces is None:
        raise CheckpointError(f"{index.folder}: the optimizer's state of {name} is not there for all ranks")
    return Gathered(layout, grid, pieces, layout.shape)


def _require_same_weights(index: Index, copies: Mapping[str, Piece], weights: Mapping[str, Piece]) -> None:
    for name, copy in copies.items():
        weight = weights[name]
        if math.prod(weight.shape) <= COMPARED_ELEMENTS and not torch.equal(
            copy.read().to(weight.dtype), weight.read()
        ):
            raise CheckpointError(
                f"{index.folder}: the fp32 copy of {name} is not where the arguments of the run put it, or not that of "
                "the weights beside it"
            )
