"""The names that a strict load of Megatron-Core wants in the files of ranks, compared with those that are there.

Our own reader takes the names of every version and of both kinds of layers; a strict load takes those of one. Which
these are follows from `versions.py`, the model and the options, not from the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mt_ckpt.megatron.folder import iteration_name
from mt_ckpt.megatron.save import core_model, is_last, model_key, part_entries, stage_files
from mt_ckpt.megatron.target import Plan, plan
from mt_ckpt.megatron.versions import shown
from mt_ckpt.pickles.torch_file import StoredTensor, open_torch_file
from mt_core.errors import CheckpointError
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.specs import CheckpointReader, ConvertOptions, StrictNames

Shapes = Mapping[str, tuple[int, ...] | None]
"""Name -> shape of a tensor; None: of what is no tensor, such as the empty FP8 states of linear layers."""
SHOWN = 8


def require_strict_names(
    path: Path, source: CheckpointReader, options: ConvertOptions, host: PluginHost
) -> StrictNames:
    """Of the `torch` format: each model part of each rank has the names and shapes of its modules' state dictionary.

    Raises CheckpointError as `mt_core.specs.RequireStrictNames` does.
    """
    made = plan(source, options, host, "torch")
    number = 0
    for stage in range(made.target.pipeline.stages):
        for name, place in stage_files(made, iteration_name(made.iteration), stage).items():
            value = open_torch_file(path / name).value
            for part in range(made.target.pipeline.parts):
                wanted = wanted_shapes(made, stage, part, made.target.grid.context(place))
                found = {key: shape_of(entry) for key, entry in value[model_key(made, part)].items()}
                require_wanted(path / name, found, wanted, made)
                number += len(wanted)
    return StrictNames(reader_of(made), number)


def wanted_shapes(made: Plan, stage: int, part: int, rank: ParallelContext) -> Shapes:
    """What the modules of a model part have on a rank, by the names of the `torch` format."""
    entries = part_entries(made, stage, part)
    local = {entry: made.layout_of(entry.name).local_shape(rank) for entry in entries}
    # Experts are stored one by one: [experts, ...] -> [...].
    shapes = {entry.stored: shape if entry.expert is None else shape[1:] for entry, shape in local.items()}
    # core_model takes shapes in the tensors' places: the same function makes what is written.
    return dict(core_model(shapes, entries, made, is_last(made, stage, part)).items)


def shape_of(entry: Any) -> tuple[int, ...] | None:
    return entry.shape if isinstance(entry, StoredTensor) else None


def require_wanted(file: Path, found: Shapes, wanted: Shapes, made: Plan) -> None:
    """Raises CheckpointError unless both have the same names with the same shapes."""
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is there and not wanted" for name in found if name not in wanted]
    problems += [
        f"{name} has the shape {found[name]}, wanted is {shape}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise CheckpointError(
            f"{file}: a strict load of {reader_of(made)} would fail: {'; '.join(problems[:SHOWN])}{more}"
        )


def reader_of(made: Plan) -> str:
    """The program that the files are for."""
    return f"Megatron-Core {shown(made.version.version)} with --transformer-impl {made.args['transformer_impl']}"
