"""The files of an iteration, opened, and the parts of the model in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mt_ckpt.megatron import names
from mt_ckpt.megatron.arguments import Arguments
from mt_ckpt.megatron.folder import RANK_FILE, RankSuffix, find_iteration, rank_folders, rank_name
from mt_ckpt.megatron.model import Grid, offsets_of
from mt_ckpt.megatron.names import StoredName
from mt_ckpt.megatron.pieces import Entry, Piece
from mt_ckpt.pickles.inert_objects import Inert
from mt_ckpt.pickles.torch_file import StoredTensor, open_torch_file
from mt_core.errors import CheckpointError
from mt_core.parallel.context import AxisName


class Flatten(Protocol):
    """The tensors of one model part of a file under Megatron-Core's names, layers numbered within the part."""

    def __call__(self, part: Mapping[str, Any], file: Path) -> Mapping[str, StoredTensor]: ...


def as_stored(piece: Piece) -> Piece:
    return piece


@dataclass(frozen=True)
class Parameter:
    """A tensor of a file. name: canonical, with the layer's number in the whole model. arrange: puts what is stored in
    the shape of the parameter, such as a state of the optimizer, in the order of `tensor`."""

    name: str
    expert: int | None
    tensor: Piece
    arrange: Callable[[Piece], Piece] = as_stored


@dataclass(frozen=True)
class RankFile:
    """One rank's file. parts: the parameters of its model parts (one, or a few with virtual pipeline stages), in the
    order in which Megatron made them."""

    file: Path
    place: Mapping[AxisName, int]
    stage: int
    value: Mapping[str, Any]
    parts: Sequence[Sequence[Parameter]]


@dataclass(frozen=True)
class Iteration:
    """All files of an iteration, of all ranks that are needed."""

    folder: Path
    args: Arguments
    grid: Grid
    stages: int
    files: Sequence[RankFile]

    @property
    def common(self) -> Mapping[str, Any]:
        """What is the same in all files: iteration, schedule, versions."""
        return self.files[0].value

    def weights(self) -> Iterator[Entry]:
        for file in self.files:
            for part in file.parts:
                for parameter in part:
                    yield Entry(file.place, parameter.name, parameter.expert, parameter.tensor)


def open_iteration(
    path: Path, flatten: Flatten, attributes: Callable[[Mapping[str, Any], Path], Mapping[str, Any]] | None = None
) -> Iteration:
    """Open every file of the iteration at `path`, or that the tracker there names.

    attributes: (a file's content, the file) -> the run's arguments; default: those that it stores.

    Raises CheckpointError naming the file that is missing or damaged, or refers to what it may not.
    """
    folder = find_iteration(path)
    by_suffix = rank_folders(folder)
    if not by_suffix:
        raise CheckpointError(f"{folder}: has no mp_rank_NN folders")
    opened: dict[Path, Mapping[str, Any]] = {}

    # The first file is needed for the arguments before the ranks are known; it is opened once.
    def content(rank: Path) -> Mapping[str, Any]:
        if rank not in opened:
            opened[rank] = _content(rank / RANK_FILE)
        return opened[rank]

    first = next(iter(by_suffix.values()))
    # All ranks store the same arguments; those of the first file stand for all.
    args = Arguments((attributes or namespace_attributes)(content(first), first / RANK_FILE), first / RANK_FILE)
    grid = Grid(args.tensor_parallel, args.expert_parallel, args.expert_tensor_parallel)
    stages = args.pipeline_parallel
    ranks = [(stage, place) for stage in range(stages) for place in grid.places()]
    folders = [_rank_folder(folder, by_suffix, args, stage, place) for stage, place in ranks]
    values = [content(rank) for rank in folders]
    models = [_model_parts(value, rank / RANK_FILE, flatten) for value, rank in zip(values, folders, strict=True)]
    offsets = _layer_offsets(models, ranks, stages)
    files = [
        RankFile(rank / RANK_FILE, place, stage, value, _parameters(model, offsets[stage]))
        for (stage, place), rank, value, model in zip(ranks, folders, values, models, strict=True)
    ]
    return Iteration(folder, args, grid, stages, files)


def _content(file: Path) -> Mapping[str, Any]:
    value = open_torch_file(file).value
    # With virtual pipeline stages a file has model0, model1, ...
    if not isinstance(value, dict) or not any(key == "model" or str(key).startswith("model0") for key in value):
        raise CheckpointError(f"{file}: no checkpoint of Megatron: it has no model")
    return value


def namespace_attributes(content: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """The run's arguments by name. Raises CheckpointError when the file does not have them."""
    args = content.get("args")
    if isinstance(args, Inert):
        return {str(key): value for key, value in args.attributes.items()}
    if isinstance(args, dict):  # the reshape tool of transformers writes a dictionary
        return args
    raise CheckpointError(f"{file}: it has no args, which say how the model and its ranks are made")


def _rank_folder(
    folder: Path, by_suffix: Mapping[RankSuffix, Path], args: Arguments, stage: int, place: Mapping[AxisName, int]
) -> Path:
    # Numbers are in the name only for axes of more than one rank.
    others = [(stage, args.pipeline_parallel), (place["ep"], args.expert_parallel)]
    suffix = RankSuffix(place["tp"], tuple(number for number, size in others if size > 1))
    if suffix in by_suffix and (by_suffix[suffix] / RANK_FILE).is_file():
        return by_suffix[suffix]
    name = rank_name(
        place["tp"], stage if args.pipeline_parallel > 1 else None, place["ep"] if args.expert_parallel > 1 else None
    )
    raise CheckpointError(
        f"{folder / name / RANK_FILE}: missing; its run had tensor_model_parallel_size={args.tensor_parallel}, "
        f"pipeline_model_parallel_size={args.pipeline_parallel}, expert_model_parallel_size={args.expert_parallel}"
    )


def _model_parts(
    value: Mapping[str, Any], file: Path, flatten: Flatten
) -> list[Mapping[str, tuple[StoredName, StoredTensor]]]:
    keys = ["model"] if "model" in value else [f"model{i}" for i in range(len(value)) if f"model{i}" in value]
    parts = [flatten(value[key], file) for key in keys]
    return [{name: (names.parse(name), tensor) for name, tensor in part.items()} for part in parts]


def _layer_offsets(
    models: Sequence[Sequence[Mapping[str, tuple[StoredName, StoredTensor]]]],
    ranks: Sequence[tuple[int, Mapping[AxisName, int]]],
    stages: int,
) -> list[list[dict[str, int]]]:
    """For each stage and part, the first layers. Parts go around: part v of stage p is the (v stages + p)-th."""
    # Every rank of a stage has the same layers: the first one stands for all.
    of_stage = [
        next(model for model, (s, _) in zip(models, ranks, strict=True) if s == stage) for stage in range(stages)
    ]
    parts = len(of_stage[0])
    # In the order of the model: part by part, within a part stage by stage. Files number layers from 0 in each part.
    counts = [
        names.layer_counts({parsed.name: None for parsed, _ in of_stage[stage][part].values()})
        for part in range(parts)
        for stage in range(stages)
    ]
    offsets = offsets_of(counts)
    return [[offsets[part * stages + stage] for part in range(parts)] for stage in range(stages)]


def _parameters(
    model: Sequence[Mapping[str, tuple[StoredName, StoredTensor]]], offsets: Sequence[Mapping[str, int]]
) -> list[list[Parameter]]:
    return [
        [Parameter(names.renumbered(parsed.name, offset), parsed.expert, tensor) for parsed, tensor in part.values()]
        for part, offset in zip(model, offsets, strict=True)
    ]
