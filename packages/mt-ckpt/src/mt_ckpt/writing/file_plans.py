"""Writes the files of a conversion, in one process or in several, with identical bytes.

Of a safetensors file each process writes parts; other files are written whole by one process.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash
from torch import Tensor

from mt_ckpt.files.checksum_file import Parts
from mt_ckpt.files.safetensors import (
    Part,
    TensorInfo,
    begin_safetensors,
    write_safetensors,
    write_tensors,
)
from mt_ckpt.files.staging import sync_file
from mt_ckpt.writing.output_folders import OutputFolder
from mt_ckpt.writing.resumable import ResumableFolder
from mt_core.checkpoint_specs import CheckpointReader, FilePart, FilePlan

MAX_PART_BYTES = 256 << 20
PARTS_A_PROCESS = 4
"""Parts per process, so that the processes finish at about the same time."""
About = Callable[[Mapping[str, TensorInfo], list[Part]], Mapping[str, Any]]
"""(tensors of a file, its parts: the header and each tensor) -> what `ResumableFolder.finish` is to keep of it"""


class PartWriter(Protocol):
    """Processes that write parts of the files at the same time (`mt_ckpt.convert.workers.Workers`). count: of them."""

    count: int

    def write(
        self, folder: Path, parts: Sequence[FilePart], plan: FilePlan, note_read: Callable[[str, int], None]
    ) -> Iterator[tuple[FilePart, Any]]:
        """Gives each part with what its writer returned, as they are written."""
        ...


@dataclass(frozen=True)
class SafetensorsFiles:
    """A `FilePlan`. files: the tensors of each, in the order in which they are written, larger elements
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
    workers: PartWriter | None = getattr(source, "workers", None)
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
    workers: PartWriter,
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


# -- files that one process writes whole --------------------------------------------------------------

FinishedFiles = Mapping[str, tuple[Parts, Mapping[str, Any]]]
"""File -> what `ResumableFolder.finish` takes of it."""


class WholeFiles(Protocol):
    """A `FilePlan` whose parts are files that are written together, `FilePart.names`."""

    def write(self, folder: Path, part: FilePart) -> FinishedFiles: ...


def files_together(names: Sequence[str]) -> FilePart:
    return FilePart(names[0], 0, tuple(names))


def write_whole_files(
    folder: ResumableFolder, plan: WholeFiles, parts: Sequence[FilePart], source: CheckpointReader
) -> dict[str, Mapping[str, Any]]:
    """Write the parts of which a file is not finished yet; returns what is recorded of each file."""
    recorded = {name: folder.finished(name) for part in parts for name in part.names}
    # Files of a part are written together, so that one that is missing costs all of them.
    missing = [part for part in parts if any(recorded[name] is None for name in part.names)]
    workers: PartWriter | None = getattr(source, "workers", None)
    if workers is None:
        # A generator: each part is finished and recorded before the next is written.
        written = ((part, plan.write(folder.content, part)) for part in missing)
    else:
        note_read = source.note_read  # type: ignore[attr-defined]
        written = workers.write(folder.content, missing, plan, note_read)  # type: ignore[assignment]
    for _, files in written:
        for name, (checksums, about) in files.items():
            folder.finish(name, checksums, about)
            recorded[name] = about
    return {name: about or {} for name, about in recorded.items()}


class WrittenFile(io.RawIOBase):
    """Written from beginning to end; the folders above it are made. `sync` when it is whole, `close` in any case."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # Buffered: the archive writer makes many small writes, of headers and directory entries.
        self._stream = path.open("wb")
        self._hasher, self._size = xxhash.xxh3_128(), 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        # Hashed as it is written, so that the file is not read again.
        self._hasher.update(data)
        self._size += len(data)
        return self._stream.write(data)

    def sync(self) -> list[tuple[int, str]]:
        """Wait until all is on the disk; returns what `ResumableFolder.finish` takes. Raises OSError."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return [(self._size, self._hasher.hexdigest())]

    def close(self) -> None:
        self._stream.close()
        super().close()
