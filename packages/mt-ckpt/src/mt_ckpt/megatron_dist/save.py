"""Writes a checkpoint in Megatron's `torch_dist` format, as the version of Megatron-Core does that it is for.

The model's tensors do not depend on the parallel layout; the target sizes are what the arguments inside say, and the
vocabulary is padded for them. An Adam's state is written as the fully reshardable one of the distributed optimizer
(--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable), as the flat buckets of the layout, or as that of an
optimizer that is not distributed. Random streams are not written: load with --no-load-rng.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mt_ckpt.megatron.folder import RELEASE, TRACKER, find_iteration, iteration_name
from mt_ckpt.megatron.metadata import KEY, scheduler_value
from mt_ckpt.megatron.optimizer import MAIN
from mt_ckpt.megatron.save import CHECKPOINT_VERSION, Shapes, reader_of, require_wanted
from mt_ckpt.megatron.target import NO_OPTIMIZER, Plan, make_plan
from mt_ckpt.megatron.versions import shown
from mt_ckpt.megatron.write_optimizer import optimizer_groups
from mt_ckpt.megatron_dist.dist_plan import ChunkItem, Source, common_optimizer, dist_plan, split_by_bytes
from mt_ckpt.megatron_dist.flat_plan import FULLY_RESHARDABLE, PLAIN
from mt_ckpt.megatron_dist.index import (
    BACKEND,
    COMMON_FILE,
    COMMON_KEY,
    MARK_FILE,
    METADATA_FILE,
    WrittenBlob,
    WrittenTensor,
    encode_index,
    read_index,
)
from mt_ckpt.pickles.encode import namespace
from mt_ckpt.pickles.torch_file import TorchWriter, write_object
from mt_ckpt.writing.file_plans import FinishedFiles, WrittenFile, files_together, write_whole_files
from mt_ckpt.writing.resumable import ResumableFolder, work_key
from mt_core.checkpoint_specs import CheckpointReader, ConvertOptions, FilePart, StrictNames
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost

MAX_FILE_BYTES = 4 << 30


def convert_checkpoint(path: Path, source: CheckpointReader, options: ConvertOptions, host: PluginHost) -> None:
    """Write `source` as a Megatron `--save` folder with one iteration (a release if it has none).

    Raises ConfigError for options and models that Megatron cannot have, CheckpointError for tensors that are not the
    model's, and OSError.
    """
    files = plan_files(source, options, host)
    plan, name = files.plan, files.folder_name
    identity = getattr(source, "identity", None)
    key = work_key("megatron-dist", identity, repr(options)) if identity else None
    with closing(ResumableFolder(path, key)) as folder:
        written = write_whole_files(folder, files, [files_together([file]) for file in files.groups], source)
        # From JSON, since files that were finished before an interruption are described by the record of the work
        # alone.
        blobs = [_from_json(entry) for about in written.values() for entry in about["blobs"]]
        # The index and the mark follow the data; the tracker is last. Megatron finds the iteration by the tracker only.
        small = {
            f"{name}/{METADATA_FILE}": encode_index(files.tensors, blobs),
            f"{name}/{MARK_FILE}": json.dumps(BACKEND).encode(),
            TRACKER: (str(plan.iteration) if name != RELEASE else RELEASE).encode(),
        }
        if plan.version.common_file:
            small = {f"{name}/{COMMON_FILE}": _pickled(files.common), **small}
        for file, data in small.items():
            folder.write_small(file, data)
        folder.commit({*small, *written})


@dataclass(frozen=True)
class DataFiles:
    """A `WholeFiles`. groups: the chunks in each data file. objects: by key, in the first one. common: what is neither
    a tensor nor belongs to one rank."""

    plan: Plan
    tensors: Mapping[str, WrittenTensor]
    groups: Mapping[str, Sequence[ChunkItem]]
    objects: Mapping[str, Any]
    common: Mapping[str, Any]

    @property
    def folder_name(self) -> str:
        return iteration_name(self.plan.iteration)

    def write(self, folder: Path, part: FilePart) -> FinishedFiles:
        objects = self.objects if part.file == next(iter(self.groups)) else {}
        with WrittenFile(folder / part.file) as stream:
            name, group = Path(part.file).name, self.groups[part.file]
            blobs = [_as_json(blob) for blob in _write_data(stream, name, self.plan, group, objects)]
            return {part.file: (stream.sync(), {"blobs": blobs})}


def plan_files(source: CheckpointReader, options: ConvertOptions, host: PluginHost) -> DataFiles:
    """The files of `convert_checkpoint` that hold tensors; raises ConfigError and CheckpointError as that does."""
    plan = make_plan(source, options, host, "torch_dist")
    optimizer_format = chosen_optimizer_format(plan, options)
    items = dist_plan(plan, optimizer_format)
    groups = split_by_bytes(items.chunks, options.max_shard_size or MAX_FILE_BYTES)
    common = _common_state(plan, host, optimizer_format)
    objects = {} if plan.version.common_file else {COMMON_KEY: [common]}
    objects |= {key: [value] for key, value in items.objects.items()}
    # As torch's writer names the files of rank 0: __<rank>_<number>.distcp.
    names = (f"{iteration_name(plan.iteration)}/__0_{number}.distcp" for number in range(len(groups)))
    return DataFiles(plan, items.tensors, dict(zip(names, groups, strict=True)), objects, common)


def chosen_optimizer_format(plan: Plan, options: ConvertOptions) -> str:
    """Raises ConfigError for a state that the version cannot load."""
    asked = options.target_optimizer_format
    if plan.states and not plan.version.model_shaped_optimizer:
        raise ConfigError(
            f"--target-megatron-version {shown(plan.version.version)}: before Megatron-Core 0.15 the optimizer's state "
            "in torch_dist was in another format, which is not written; --target-optimizer-format none leaves it out, "
            "and --saver megatron writes it"
        )
    if asked in (None, NO_OPTIMIZER):
        return FULLY_RESHARDABLE if plan.distributed else PLAIN
    return asked


def _pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    write_object(stream, value)
    return stream.getvalue()


def _write_data(
    stream: WrittenFile, name: str, plan: Plan, group: Sequence[ChunkItem], objects: Mapping[str, Any]
) -> Iterator[WrittenBlob]:
    """Write objects, then chunks; name: of the file. Chunks of one tensor that follow one another cost one read."""
    for key, value in objects.items():
        begin = stream.tell()
        write_object(stream, value)
        yield WrittenBlob(key, None, (), name, begin, stream.tell() - begin)
    read: tuple[Source, Tensor] | None = None
    for item in group:
        if read is None or read[0] != item.source:
            read = None  # before the next is read
            read = (item.source, plan.read(plan.source_of(item.source.name), item.source.state))
        begin = stream.tell()
        # Each chunk is an archive of its own, as DCP stores it; its offset and length go into the index.
        writer = TorchWriter(stream)
        part = _part(read[1], item, plan)
        writer.finish(writer.add(part.reshape(item.sizes)))
        yield WrittenBlob(item.key, item.offsets, item.sizes, name, begin, stream.tell() - begin)


def _part(tensor: Tensor, item: ChunkItem, plan: Plan) -> Tensor:
    if item.rank is not None:
        local = plan.layout_of(item.source.name).to_local(tensor, item.rank)
        local = (local if item.expert is None else local[item.expert]).reshape(-1)
        # The zeros are the gap to the next parameter of the bucket.
        return F.pad(local, (0, item.sizes[0] - local.numel()))
    if item.expert is not None:
        return tensor[item.expert]
    return tensor.narrow(0, item.rows.first, item.rows.count) if tensor.ndim else tensor


def _common_state(plan: Plan, host: PluginHost, optimizer_format: str) -> dict[str, Any]:
    """What is neither a tensor nor belongs to one rank."""
    reshardable = optimizer_format == FULLY_RESHARDABLE
    args = {
        **plan.args,
        "use_distributed_optimizer": bool(plan.states) and optimizer_format != PLAIN,
        "dist_ckpt_optim_fully_reshardable": reshardable,
    }
    state: dict[str, Any] = {
        "args": namespace({**args, "no_save_optim": not plan.states or None, "no_save_rng": True}),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": plan.iteration,
        "num_floating_point_operations_so_far": plan.source.metadata.get(KEY, {}).get(
            "num_floating_point_operations_so_far", 0
        ),
    }
    # Megatron reads content_metadata first: the state dict that it builds to load into depends on it.
    content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if plan.states:
        groups = optimizer_groups(plan.layouts, plan.optimizer, plan.step(), experts_apart=plan.experts_apart)
        mixed_precision = MAIN in plan.states
        state["optimizer"] = common_optimizer(groups, optimizer_format, mixed_precision=mixed_precision)
        state["opt_param_scheduler"] = scheduler_value(plan.source.metadata, host)
        content |= {"distrib_optim_sharding_type": optimizer_format} if optimizer_format != PLAIN else {}
        content |= {"distrib_optim_fully_reshardable_mem_efficient": False} if reshardable else {}
    return state | {"content_metadata": content}


def _as_json(blob: WrittenBlob) -> dict[str, Any]:
    return {**blob.__dict__, "offsets": None if blob.offsets is None else list(blob.offsets), "sizes": list(blob.sizes)}


def _from_json(entry: dict[str, Any]) -> WrittenBlob:
    offsets = entry["offsets"]
    return WrittenBlob(
        **{**entry, "offsets": None if offsets is None else tuple(offsets), "sizes": tuple(entry["sizes"])}
    )


# -- keys that a strict load requires, compared with those of the index ------------------------------


def require_strict_names(
    path: Path, source: CheckpointReader, options: ConvertOptions, host: PluginHost
) -> StrictNames:
    """Check the `torch_dist` format, the optimizer's state included: --dist-ckpt-strictness raise_all passes.

    Raises CheckpointError as `mt_core.checkpoint_specs.RequireStrictNames` does.
    """
    plan = make_plan(source, options, host, "torch_dist")
    planned = dist_plan(plan, chosen_optimizer_format(plan, options))
    common = {} if plan.version.common_file else {COMMON_KEY: None}
    objects = dict.fromkeys(planned.objects)
    wanted: Shapes = {key: tensor.shape for key, tensor in planned.tensors.items()} | objects | common
    folder = find_iteration(path)
    index = read_index(folder)
    stored: Shapes = {key: tensor.shape for key, tensor in index.tensors.items()} | dict.fromkeys(index.objects)
    require_wanted(folder / METADATA_FILE, stored, wanted, plan)
    return StrictNames(reader_of(plan), len(wanted))
