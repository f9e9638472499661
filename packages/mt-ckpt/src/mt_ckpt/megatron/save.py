"""Writes a checkpoint in Megatron-Core's `torch` format, for any tensor, pipeline and expert parallel sizes.

RNG states are not written: load with --no-load-rng; a checkpoint without an optimizer's state is
loaded with --no-load-optim (or both by --finetune).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from mt_ckpt.files.checksum_file import Parts
from mt_ckpt.megatron.folder import OPTIMIZER_FILE, RANK_FILE, RELEASE, TRACKER, iteration_name, rank_name
from mt_ckpt.megatron.metadata import KEY, scheduler_value
from mt_ckpt.megatron.names import EXPERTS, duplicates
from mt_ckpt.megatron.optimizer import MAIN
from mt_ckpt.megatron.rank_plan import Naming, RankEntry, extra_states
from mt_ckpt.megatron.target import DISTRIBUTED, NO_OPTIMIZER, Plan, make_plan
from mt_ckpt.megatron.versions import shown
from mt_ckpt.megatron.write_optimizer import FlatRank, groups_value, optimizer_groups, optimizer_value, write_flat
from mt_ckpt.pickles.encode import Call, OrderedItems, namespace
from mt_ckpt.pickles.torch_file import StoredTensor, TorchWriter, open_torch_file
from mt_ckpt.writing.file_plans import FinishedFiles, WrittenFile, files_together, write_whole_files
from mt_ckpt.writing.options import refuse
from mt_ckpt.writing.resumable import ResumableFolder, work_key
from mt_core.checkpoint_specs import CheckpointReader, ConvertOptions, FilePart, StrictNames
from mt_core.errors import CheckpointError
from mt_core.parallel.context import AxisName, ParallelContext
from mt_core.plugins import PluginHost

CHECKPOINT_VERSION = 3.0


def convert_checkpoint(path: Path, source: CheckpointReader, options: ConvertOptions, host: PluginHost) -> None:
    """Write `source` as a Megatron `--save` folder: the tracker file and one iteration (a release if it has none).

    An Adam's state is written if the source has one for all parameters: into the rank's file, or of a run that divided
    its optimizer as flat buffers beside it. Raises ConfigError for options and models that
    Megatron cannot have, CheckpointError for tensors that are not the model's, and OSError.
    """
    save_ranks(path, plan_files(source, options, host), options)


def _plan(source: CheckpointReader, options: ConvertOptions, host: PluginHost) -> Plan:
    if options.target_optimizer_format not in (None, NO_OPTIMIZER):
        why = "the optimizer's state is in files of ranks"
        refuse("megatron", options, "target_optimizer_format", why=f"{why}; only none is an option of it")
    return make_plan(source, options, host, "torch")


@dataclass
class RankParts:
    """What has been written of a rank. parts: for each model part, the entries in order; encoded: (part, stored name)
    -> state (None: the weights) -> the tensor in the pickle, with its number of dimensions."""

    writer: TorchWriter
    ctx: ParallelContext
    parts: list[list[RankEntry]] = field(default_factory=list)
    encoded: dict[tuple[int, str], dict[str | None, Call]] = field(default_factory=dict)
    dims: dict[tuple[int, str], int] = field(default_factory=dict)

    def weights(self, part: int) -> dict[str, Call]:
        return {entry.stored: self.encoded[part, entry.stored][None] for entry in self.parts[part]}


class MakeModel(Protocol):
    """Makes the value under `model`. weights: of a part, by stored name. last: whether it is the last of the model."""

    def __call__(self, weights: Mapping[str, Call], entries: Sequence[RankEntry], plan: Plan, last: bool) -> Any: ...


@dataclass(frozen=True)
class RankFiles:
    """A `WholeFiles`: a file for each rank, and of a distributed optimizer one beside it."""

    plan: Plan
    host: PluginHost
    model_value: MakeModel = field(default_factory=lambda: core_model)

    def stages(self) -> list[dict[str, Mapping[AxisName, int]]]:
        """For each pipeline stage, file -> the place of its rank."""
        name = iteration_name(self.plan.iteration)
        return [stage_files(self.plan, name, stage) for stage in range(self.plan.target.pipeline.stages)]

    def parts(self, *, by_rank: bool) -> list[FilePart]:
        """Those of a stage together, so that a tensor is read once and cut into all of them, or one by one."""
        groups = [[name] for files in self.stages() for name in files] if by_rank else [list(f) for f in self.stages()]
        beside = optimizer_file if self.plan.distributed else None
        return [files_together([*group, *(map(beside, group) if beside else ())]) for group in groups]

    def write(self, folder: Path, part: FilePart) -> FinishedFiles:
        for stage, places in enumerate(self.stages()):
            if files := {name: place for name, place in places.items() if name in part.names}:
                return dict(_write_ranks(folder, files, self, stage))
        raise AssertionError(f"no rank has {part.file}")


def takes_file(_: str) -> bool:
    """Megatron's folders have no place for files of a tokenizer."""
    return False


def plan_files(source: CheckpointReader, options: ConvertOptions, host: PluginHost) -> RankFiles:
    """The files of `convert_checkpoint` that hold tensors; raises ConfigError and CheckpointError as that does."""
    return RankFiles(_plan(source, options, host), host)


def save_ranks(path: Path, ranks: RankFiles, options: ConvertOptions) -> None:
    """Write the files of all ranks, and the tracker; see `convert_checkpoint`."""
    plan = ranks.plan
    identity = getattr(plan.source, "identity", None)
    key = work_key("megatron", plan.args["ckpt_format"], identity, repr(options)) if identity else None
    folder_name = iteration_name(plan.iteration)
    with closing(ResumableFolder(path, key)) as folder:
        # With several processes each rank's file is a part, which shortens the wait; a tensor is then read once per
        # file.
        parts = ranks.parts(by_rank=getattr(plan.source, "workers", None) is not None)
        written = write_whole_files(folder, ranks, parts, plan.source)
        text = str(plan.iteration) if folder_name != RELEASE else RELEASE
        folder.write_small(TRACKER, text.encode())
        folder.commit({*written, TRACKER})


def model_key(plan: Plan, part: int) -> str:
    """Under which a rank's file has a model part."""
    return "model" if plan.target.pipeline.parts == 1 else f"model{part}"


def is_last(plan: Plan, stage: int, part: int) -> bool:
    """Whether a model part is the last of the whole model."""
    return stage == plan.target.pipeline.stages - 1 and part == plan.target.pipeline.parts - 1


def stage_files(plan: Plan, folder_name: str, stage: int) -> dict[str, Mapping[AxisName, int]]:
    """File -> the place of its rank."""
    grid, stages = plan.target.grid, plan.target.pipeline.stages
    return {
        f"{folder_name}/{rank_name(place['tp'], stage if stages > 1 else None, place['ep'] if grid.ep > 1 else None)}/"
        f"{RANK_FILE}": place
        for place in grid.places()
    }


def optimizer_file(rank_file: str) -> str:
    """Beside a rank's file, that of the distributed optimizer."""
    return f"{rank_file.removesuffix(RANK_FILE)}{OPTIMIZER_FILE}"


def _write_ranks(
    folder: Path, files: Mapping[str, Mapping[AxisName, int]], rank_files: RankFiles, stage: int
) -> Iterator[tuple[str, tuple[Parts, Mapping[str, Any]]]]:
    """Every tensor of the stage is read once, and cut into all these files of it."""
    plan = rank_files.plan
    with ExitStack() as stack:
        streams = [stack.enter_context(WrittenFile(folder / name)) for name in files]
        ranks = [
            RankParts(TorchWriter(stream, Path(RANK_FILE).stem), plan.target.grid.context(place))
            for stream, place in zip(streams, files.values(), strict=True)
        ]
        # Tensors go to the files as they are read. The pickle, which names them, follows in `finish`.
        for part in range(plan.target.pipeline.parts):
            _write_part(ranks, plan, stage, part)
        for rank in ranks:
            rank.writer.finish(_rank_value(rank, plan, stage, rank_files.host, rank_files.model_value))
        for name, stream in zip(files, streams, strict=True):
            yield name, (stream.sync(), {})
        # After the ranks' files: a state is one buffer, in the reverse order of the parameters.
        if plan.distributed:
            yield from _write_optimizers(folder, list(files), ranks, plan, stage)


def _write_optimizers(
    folder: Path, files: Sequence[str], ranks: Sequence[RankParts], plan: Plan, stage: int
) -> Iterator[tuple[str, tuple[Parts, Mapping[str, Any]]]]:
    with ExitStack() as stack:
        names = [optimizer_file(name) for name in files]
        streams = [stack.enter_context(WrittenFile(folder / name)) for name in names]
        flat = [
            FlatRank(TorchWriter(stream, Path(OPTIMIZER_FILE).stem), rank.ctx)
            for stream, rank in zip(streams, ranks, strict=True)
        ]
        write_flat(plan, flat, stage, ranks[0].parts)
        for name, stream in zip(names, streams, strict=True):
            yield name, (stream.sync(), {})


def _write_part(ranks: Sequence[RankParts], plan: Plan, stage: int, part: int) -> None:
    entries = part_entries(plan, stage, part)
    # An expert's entries are one stacked parameter, read once.
    by_name: dict[str, list[RankEntry]] = {}
    for entry in entries:
        by_name.setdefault(entry.name, []).append(entry)
    for rank in ranks:
        rank.parts.append(entries)
    for name, members in by_name.items():
        for state in (None, *_states_beside(plan, name)):
            _write_tensor(ranks, plan, part, name, members, state)


def part_entries(plan: Plan, stage: int, part: int) -> list[RankEntry]:
    """The parameters of a model part, in order."""
    naming = Naming(plan.torch_style(), _has_grouped_experts(plan))
    run = plan.runs[plan.target.pipeline.run(stage, part)]
    return list(naming.entries(run, _experts_of_a_rank(plan)))


def _has_grouped_experts(plan: Plan) -> bool:
    """A hybrid model's experts are grouped, whatever the arguments say, since its layers are those of one module."""
    return not plan.local and (plan.hybrid or bool(plan.args.get("moe_grouped_gemm", False)))


def _states_beside(plan: Plan, name: str) -> list[str]:
    """The optimizer's states of a parameter that go into the model's file."""
    if plan.distributed or not plan.trained(name):
        return []
    # Of fp32 weights no fp32 copies are written: without the distributed optimizer Megatron has none.
    return [state for state in plan.states if state != MAIN or plan.rounded(plan.source_of(name))]


def _write_tensor(
    ranks: Sequence[RankParts], plan: Plan, part: int, name: str, members: Sequence[RankEntry], state: str | None
) -> None:
    layout, tensor = plan.layout_of(name), plan.read(plan.source_of(name), state)
    for rank in ranks:
        local = layout.to_local(tensor, rank.ctx)
        for entry in members:
            # local: the rank's slice; of experts [experts of the rank, ...], which a file has one by one.
            piece = local if entry.expert is None else local[entry.expert]
            key = (part, entry.stored)
            rank.encoded.setdefault(key, {})[state] = rank.writer.add(piece)
            rank.dims[key] = piece.ndim


def _experts_of_a_rank(plan: Plan) -> int:
    stacked = [layout.shape[0] for name, layout in plan.layouts.items() if EXPERTS in name]
    return stacked[0] // plan.target.grid.ep if stacked else 0


def _rank_value(rank: RankParts, plan: Plan, stage: int, host: PluginHost, model_value: MakeModel) -> dict[str, Any]:
    parts = plan.target.pipeline.parts
    # no_save_optim is None, not False, in arguments of runs that did not set it.
    value: dict[str, Any] = {
        "args": namespace(
            {**plan.args, DISTRIBUTED: plan.distributed, "no_save_optim": not plan.states or None, "no_save_rng": True}
        ),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": plan.iteration,
    }
    for part in range(parts):
        model = model_value(rank.weights(part), rank.parts[part], plan, is_last(plan, stage, part))
        value[model_key(plan, part)] = model
    if plan.states:
        value["optimizer"] = _optimizer(rank, plan)
        value["opt_param_scheduler"] = scheduler_value(plan.source.metadata, host)
    flops = plan.source.metadata.get(KEY, {}).get("num_floating_point_operations_so_far", 0)
    return value | {"num_floating_point_operations_so_far": flops}


def _optimizer(rank: RankParts, plan: Plan) -> Any:
    if plan.distributed:
        groups = optimizer_groups(plan.layouts, plan.optimizer, plan.step(), experts_apart=plan.experts_apart)
        return groups_value(groups)
    members = [
        (entry, rank.dims[part, entry.stored], {state: call for state, call in states.items() if state is not None})
        for part, entries in enumerate(rank.parts)
        for entry in entries
        if plan.trained(entry.name) and (states := rank.encoded[part, entry.stored])
    ]
    # A tensor of its own for each parameter, as torch's state has it.
    updates = plan.step()
    return optimizer_value(
        members, plan.optimizer, lambda: rank.writer.add(torch.tensor(updates)), experts_apart=plan.experts_apart
    )


def core_model(weights: Mapping[str, Any], entries: Sequence[RankEntry], plan: Plan, last: bool) -> OrderedItems:
    """Megatron-Core's state dictionary: parameters, those that have two names, and None for FP8 states. weights: stored
    name -> the tensor, or whatever stands for it."""
    items: dict[str, Any] = dict(weights)
    is_t5 = plan.config.model.family == "t5"
    if is_t5:
        twice = duplicates(plan.version, distributed=False)
        # The same tensor (and storage) under both names.
        items |= {again: weights[once] for again, once in twice.items() if once in weights}
    heads = ("output_layer", *(("lm_head.output_layer",) if is_t5 else ())) if last else ()
    return OrderedItems({**items, **dict.fromkeys(extra_states(entries, heads))})


# -- names that a strict load requires in the files of ranks -----------------------------------------
#
# Our own reader takes the names of every version and of both kinds of layers; a strict load takes those of one. Which
# these are follows from `versions.py`, the model and the options, not from the files.

Shapes = Mapping[str, tuple[int, ...] | None]
"""Name -> shape of a tensor; None: of what is no tensor, such as the empty FP8 states of linear layers."""
SHOWN = 8


def require_strict_names(
    path: Path, source: CheckpointReader, options: ConvertOptions, host: PluginHost
) -> StrictNames:
    """Check the `torch` format: each model part of each rank has the names and shapes of its modules' state dictionary.

    Raises CheckpointError as `mt_core.checkpoint_specs.RequireStrictNames` does.
    """
    plan = make_plan(source, options, host, "torch")
    number = 0
    for stage in range(plan.target.pipeline.stages):
        for name, place in stage_files(plan, iteration_name(plan.iteration), stage).items():
            value = open_torch_file(path / name).value
            for part in range(plan.target.pipeline.parts):
                wanted = wanted_shapes(plan, stage, part, plan.target.grid.context(place))
                stored = {key: shape_of(entry) for key, entry in value[model_key(plan, part)].items()}
                require_wanted(path / name, stored, wanted, plan)
                number += len(wanted)
    return StrictNames(reader_of(plan), number)


def wanted_shapes(plan: Plan, stage: int, part: int, rank: ParallelContext) -> Shapes:
    """What the modules of a model part have on a rank, by the names of the `torch` format."""
    entries = part_entries(plan, stage, part)
    local = {entry: plan.layout_of(entry.name).local_shape(rank) for entry in entries}
    # Experts are stored one by one: [experts, ...] -> [...].
    shapes = {entry.stored: shape if entry.expert is None else shape[1:] for entry, shape in local.items()}
    # core_model takes shapes in the tensors' places: the same function makes what is written.
    return dict(core_model(shapes, entries, plan, is_last(plan, stage, part)).items)


def shape_of(entry: Any) -> tuple[int, ...] | None:
    return entry.shape if isinstance(entry, StoredTensor) else None


def require_wanted(file: Path, stored: Shapes, wanted: Shapes, plan: Plan) -> None:
    """Raises CheckpointError unless both have the same names with the same shapes."""
    problems = [f"{name} is missing" for name in wanted if name not in stored]
    problems += [f"{name} is there and not wanted" for name in stored if name not in wanted]
    problems += [
        f"{name} has the shape {stored[name]}, wanted is {shape}"
        for name, shape in wanted.items()
        if name in stored and stored[name] != shape
    ]
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise CheckpointError(
            f"{file}: a strict load of {reader_of(plan)} would fail: {'; '.join(problems[:SHOWN])}{more}"
        )


def reader_of(plan: Plan) -> str:
    """The program that the files are for."""
    return f"Megatron-Core {shown(plan.version.version)} with --transformer-impl {plan.args['transformer_impl']}"
