"""Writes the safetensors files of a conversion, in one process or in several, with identical bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mt_ckpt.convert.targets import OutputFolder
from mt_ckpt.convert.workers import Workers
from mt_ckpt.native.staging import sync_file
from mt_ckpt.safetensors_files import (
    Part,
    TensorInfo,
    begin_safetensors,
    write_safetensors,
    write_tensors,
)
from mt_core.specs import CheckpointReader, FilePart

MAX_PART_BYTES = 256 << 20
PARTS_A_PROCESS = 4
"""Parts per process, so that the processes finish at about the same time."""
About = Callable[[Mapping[str, TensorInfo], list[Part]], Mapping[str, Any]]
"""(tensors of a file, its parts: the header and each tensor) -> what `ResumableFolder.finish` is to keep of it"""


@dataclass(frozen=True)
class SafetensorsFiles:
    """A `mt_core.specs.FilePlan`. files: the tensors of each, in the order in which they are written, larger elements
    first. values: of the named tensors, one by one. made_of: what a tensor is computed from; those that follow one
    another and are made of one thing are written by one process."""

    files: Mapping[str, Mapping[str, TensorInfo]]
    values: Callable[[Iterable[str]], Iterator[Tensor]]
    made_of: Callable[[str], str] = lambda name: name

    def write(self, folder: Path, part: FilePart) -> list[Part]:
        """Write some tensors into a file whose header is already written."""
        infos = {name: self.files[part.file][name] for name in part.names}
        return write_tensors(folder / part.file, infos, self.values(infos), part.offset)


def write_files(
    folder: OutputFolder,
    plan: SafetensorsFiles,
    source: CheckpointReader,
    about: About = lambda infos, parts: {},
) -> dict[str, Mapping[str, Any]]:
    """Write the files that are not finished yet; returns the records of all files."""
    kept = {file: folder.finished(file) for file in plan.files}
    missing = {file: plan.files[file] for file, entry in kept.items() if entry is None}
    workers: Workers | None = getattr(source, "workers", None)
    written = _write_here(folder, plan, missing) if workers is None else _share(folder, plan, missing, source, workers)
    # A file is recorded as soon as it is complete: a kill costs at most the files that are being written.
    for file, parts in written:
        kept[file] = about(missing[file], parts)
        folder.finish(file, parts, kept[file])
    return {file: entry or {} for file, entry in kept.items()}


def _write_here(
    folder: OutputFolder, plan: SafetensorsFiles, files: Mapping[str, Mapping[str, TensorInfo]]
) -> Iterator[tuple[str, list[Part]]]:
    for file, infos in files.items():
        yield file, write_safetensors(folder.content / file, infos, plan.values(infos))


def _share(
    folder: OutputFolder,
    plan: SafetensorsFiles,
    files: Mapping[str, Mapping[str, TensorInfo]],
    source: Any,
    workers: Workers,
) -> Iterator[tuple[str, list[Part]]]:
    """Yields a file after all of its parts are written and synced."""
    # All files exist with their final size before a worker opens one; workers write disjoint ranges.
    headers = {file: begin_safetensors(folder.content / file, infos) for file, infos in files.items()}
    tasks = list(_parts_of(plan, files, headers, workers.count))
    left = {file: [task for task in tasks if task.file == file] for file in files}
    results: dict[FilePart, list[Part]] = {}
    for task, parts in workers.write(folder.content, tasks, plan, source.note_read):
        results[task] = parts
        # Parts end in any order; a file is complete with its last one.
        if all(other in results for other in left[task.file]):
            # Workers sync what they wrote; the header was written by this process.
            sync_file(folder.content / task.file)
            yield task.file, [headers[task.file], *(part for other in left[task.file] for part in results.pop(other))]


def _parts_of(
    plan: SafetensorsFiles,
    files: Mapping[str, Mapping[str, TensorInfo]],
    headers: Mapping[str, Part],
    processes: int,
) -> Iterator[FilePart]:
    total = sum(info.num_bytes for infos in files.values() for info in infos.values())
    # At least 1: a model without bytes still has a part.
    size = max(1, min(MAX_PART_BYTES, total // (PARTS_A_PROCESS * processes)))
    for file, infos in files.items():
        offset = headers[file][0]
        for names in _groups(infos, plan.made_of, size):
            yield FilePart(file, offset, names)
            offset += sum(infos[name].num_bytes for name in names)


def _groups(
    infos: Mapping[str, TensorInfo], made_of: Callable[[str], str], max_bytes: int
) -> Iterator[tuple[str, ...]]:
    """Names that follow one another, of about max_bytes; a group ends only where the next is made of something else."""
    group: list[str] = []
    num_bytes = 0
    for name, info in infos.items():
        # Not between parts of one canonical tensor: two processes would both read it whole.
        if group and num_bytes + info.num_bytes > max_bytes and made_of(name) != made_of(group[-1]):
            yield tuple(group)
            group, num_bytes = [], 0
        group.append(name)
        num_bytes += info.num_bytes
    if group:
        yield tuple(group)
