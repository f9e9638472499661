"""The optimizer's state as flat buckets (`dp_reshardable`, Megatron's default), tied to the parameters' names.

Each rank of tensor and pipeline parallelism has separate buckets, which hold what `mt_ckpt.megatron.flat_buffers`
describes; with expert parallel ranks those of the experts are apart, one set for each rank that has other experts. The
files do not name the parameters, so their order is that in which Megatron makes them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mt_ckpt.megatron.arguments import Arguments
from mt_ckpt.megatron.flat_buffers import Bucket, FlatParameter, bucketing, buckets_of, shared_matrices
from mt_ckpt.megatron.model import Grid, as_written
from mt_ckpt.megatron.names import EMBEDDING, EXPERTS, Style, norms_apart, torch_renamed
from mt_ckpt.megatron.optimizer import COMPARED_ELEMENTS, FLAT_STATES
from mt_ckpt.megatron.pieces import Entry, Gathered, Held, Piece, choose, hold
from mt_ckpt.megatron.rank_plan import Naming, Pipeline, RankEntry, split_layers
from mt_ckpt.megatron_dist.index import ChunkedTensor, Index, newest_that_writes
from mt_core.errors import CheckpointError
from mt_core.nn.layout import ParameterLayout
from mt_core.parallel.context import AxisName

OPTIMIZER_OBJECT = "optimizer.distributed."
"""In the keys of what an optimizer stores beside its buckets."""
_KEY = re.compile(
    r"^(?:chained_(?P<optimizer>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.gbuf_idx_(?P<part>\d+)\."
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
        return self.bucket.read_slice((self.first,), (last,)).view(self.shape)


def has_flat_optimizer(index: Index) -> bool:
    return any(_matches(index))


@dataclass(frozen=True)
class _Rank:
    """Whose buckets they are: rank `group` over all stages, of the experts' optimizer or the other one. part: the
    number of the buffer."""

    of_experts: bool
    group: int
    part: int


def flat_optimizer(
    index: Index, args: Arguments, layouts: Mapping[str, ParameterLayout], weights: Mapping[str, Piece]
) -> dict[str, dict[str, Piece]]:
    """State -> canonical name -> tensor. Raises CheckpointError when the buckets do not fit the parameters."""
    local = args.get("transformer_impl") == "local"
    version = newest_that_writes(index.folder)
    trained = {name: layout for name, layout in as_written(layouts, version, local=local).items() if layout.trained}
    fused: Literal["never", "beside"] = "never" if local else "beside"
    hybrid = bool(args.get("is_hybrid_model", False))
    # Buckets follow the order in which modules were made, which depends on whose layers they are: names of the `torch`
    # format, also in a folder of torch_dist.
    style = Style(fused, hybrid, trained, norms_apart(version), torch_renamed(version))
    naming = Naming(style, not local and (hybrid or bool(args.get("moe_grouped_gemm", False))))
    stored = _buckets(index)
    # gbuf_idx counts the model parts (virtual pipeline stages) of a rank.
    pipeline = Pipeline(args.pipeline_parallel, 1 + max(rank.part for rank in stored))
    model = _Model(index, args, trained, naming, split_layers(trained, pipeline), pipeline)
    entries: dict[str, list[Entry]] = {}
    for rank, buckets in stored.items():
        for state, entry in model.entries(rank, buckets):
            entries.setdefault(state, []).append(entry)
    states: dict[str, dict[str, Piece]] = {
        state: {name: _gathered(index, name, trained[name], model.grid, parts) for name, parts in hold(held).items()}
        for state, held in entries.items()
    }
    _require_same_weights(index, states.get("main", {}), weights)
    return states


@dataclass(frozen=True)
class _Model:
    """The parameters of a run, and which rank has what. runs: of the pipeline, the parameters of each."""

    index: Index
    args: Arguments
    layouts: Mapping[str, ParameterLayout]
    naming: Naming
    runs: Sequence[Sequence[str]]
    pipeline: Pipeline

    @property
    def grid(self) -> Grid:
        return Grid(self.args.tensor_parallel, self.args.expert_parallel, self.args.expert_tensor_parallel)

    def entries(self, rank: _Rank, stored: Sequence[Mapping[str, ChunkedTensor]]) -> Iterator[tuple[str, Entry]]:
        """(state, what the rank holds of a parameter)"""
        stage, place = self._place(rank)
        # gbuf_idx counts the buffers that exist: of the parts in which this optimizer has parameters.
        part, members = self._parts(stage, rank.of_experts)[rank.part]
        shapes = {key: self._shape(entry, place) for key, entry in members.items()}
        shared = shared_matrices(self.args)
        flat = [FlatParameter(key, math.prod(shapes[key]), entry.name in shared) for key, entry in members.items()]
        planned = buckets_of(flat, bucketing(self.args, stage, part, of_experts=rank.of_experts))
        _require_sizes(self.index, rank.group, planned, stored)
        for bucket, states in zip(planned, stored, strict=True):
            for key, first in bucket.first.items():
                entry = members[key]
                for name, state in FLAT_STATES.items():
                    if name in states and entry.name in self.layouts:  # the copy of the token embeddings is not
                        piece = BucketPart(states[name], first, shapes[key])
                        yield state, Entry(place, entry.name, entry.expert, piece)

    def _place(self, rank: _Rank) -> tuple[int, Mapping[AxisName, int]]:
        """Stage and place of a rank."""
        grid = self.grid
        # Groups are numbered stage by stage, as `flat_plan._owners` does.
        if rank.of_experts:
            stage, number = divmod(rank.group, grid.ep * grid.etp)
            return stage, grid.place_of_expert_rank(number)
        stage, number = divmod(rank.group, grid.tp)
        return stage, grid.place_of_tensor_rank(number)

    def _parts(self, stage: int, of_experts: bool) -> list[tuple[int, dict[str, RankEntry]]]:
        """(number, stored name -> entry) of the stage's parts in which the optimizer has parameters."""
        stacked = [layout.shape[0] for name, layout in self.layouts.items() if EXPERTS in name]
        experts = stacked[0] // self.grid.ep if stacked else 0
        apart, parts = self.grid.ep > 1, []
        for part in range(self.pipeline.parts):
            entries = self.naming.entries(self.runs[self.pipeline.run(stage, part)], experts)
            members = {e.stored: e for e in entries if (apart and e.expert is not None) == of_experts}
            parts += [(part, members)] if members else []
        return parts

    def _shape(self, entry: RankEntry, place: Mapping[AxisName, int]) -> tuple[int, ...]:
        # The last stage's copy of the token embeddings has no layout of its own.
        name = entry.name if entry.name in self.layouts else EMBEDDING
        shape = self.layouts[name].local_shape(self.grid.context(place))
        # Experts are stored one by one: [experts, ...] -> [...].
        return shape if entry.expert is None else shape[1:]


def reason_not_read(index: Index, args: Arguments) -> str | None:
    """Why buckets cannot be tied to parameters, of runs where nothing in the files says it; None: they can."""
    # Of other optimizers nothing in the files says which parameters they have.
    optimizers = {int(match["optimizer"]) for match in _matches(index) if match["optimizer"]}
    if not optimizers <= {0, int(args.expert_parallel > 1)}:
        return "its flat buckets (dp_reshardable) are of other optimizers than the experts' and one of all the rest"
    if args.pipeline_parallel > 1 and any(args.get(name, False) for name in UNEVEN):
        return "its flat buckets (dp_reshardable) belong to pipeline stages that are not alike"
    return None


def _buckets(index: Index) -> dict[_Rank, list[dict[str, ChunkedTensor]]]:
    """For each bucket of a rank, state -> flat tensor."""
    by_rank: dict[_Rank, dict[int, dict[str, ChunkedTensor]]] = {}
    for match in _matches(index):
        rank = _Rank(match["optimizer"] == "1", int(match["group"]), int(match["part"]))
        by_rank.setdefault(rank, {}).setdefault(int(match["bucket"]), {})[match["state"]] = index.tensors[match[0]]
    # Bucket 10 follows bucket 9: numbers are sorted as numbers, keys of the index as text.
    return {rank: [buckets[number] for number in sorted(buckets)] for rank, buckets in by_rank.items()}


def _matches(index: Index) -> Iterator[re.Match[str]]:
    return (match for key in index.tensors if (match := _KEY.match(key)))


def _require_sizes(
    index: Index, group: int, planned: Sequence[Bucket], buckets: Sequence[Mapping[str, ChunkedTensor]]
) -> None:
    sizes = [bucket.numel for bucket in planned]
    stored = [next(iter(states.values())).shape[0] for states in buckets]
    if sizes != stored:
        raise CheckpointError(
            f"{index.folder}: the optimizer's buckets of rank {group} have {stored} elements, the model makes {sizes}"
        )


def _gathered(index: Index, name: str, layout: ParameterLayout, grid: Grid, held: Sequence[Held]) -> Gathered:
    pieces = choose(layout, grid, held)
    if pieces is None:
        raise CheckpointError(f"{index.folder}: the optimizer's state of {name} is not there for all ranks")
    return Gathered(layout, grid, pieces, layout.shape)


def _require_same_weights(index: Index, copies: Mapping[str, Piece], weights: Mapping[str, Piece]) -> None:
    for name, copy in copies.items():
        weight = weights[name]
        # Small parameters (norms, biases) suffice: with a wrong order of parameters their places hold other values.
        if math.prod(weight.shape) <= COMPARED_ELEMENTS and not torch.equal(
            copy.read().to(weight.dtype), weight.read()
        ):
            raise CheckpointError(
                f"{index.folder}: the fp32 copy of {name} is not where the arguments of the run put it, or not that of "
                "the weights beside it"
            )
