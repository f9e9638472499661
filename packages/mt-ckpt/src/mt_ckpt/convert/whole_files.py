"""Writes the files of a format whose files are each made by one process, in one process or in several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mt_ckpt.convert.checksums import Parts
from mt_ckpt.convert.resumable import ResumableFolder
from mt_ckpt.convert.workers import Workers
from mt_core.specs import CheckpointReader, FilePart

FinishedFiles = Mapping[str, tuple[Parts, Mapping[str, Any]]]
"""File -> what `ResumableFolder.finish` takes of it."""


class WholeFiles(Protocol):
    """A `mt_core.specs.FilePlan` whose parts are files that are written together, `FilePart.names`."""

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
    workers: Workers | None = getattr(source, "workers", None)
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
