"""The checksum file of a conversion's output, for formats without checksums.

It is JSON of the kind of a manifest: the first line holds the checksum of all other bytes, then come for each file its
parts in order, each with its number of bytes and its XXH3 checksum. Readers of the formats ignore it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mt_ckpt.native.checksum import ALGORITHM, checksum, checksum_range
from mt_ckpt.native.manifest import parse_json
from mt_ckpt.native.read import check_size
from mt_core.errors import CheckpointError

CHECKSUMS = "mt-checksums.json"
FORMAT, VERSION = "mt-checksums", 1
Parts = Sequence[tuple[int, str]]
"""Number of bytes and checksum of what a file consists of, in order."""


@dataclass(frozen=True)
class Checksums:
    """What is recorded about the files of a checkpoint. folder: the root of their names, with forward slashes."""

    folder: Path
    files: Mapping[str, Parts]

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for parts in self.files.values() for num_bytes, _ in parts)


def encode_checksums(files: Mapping[str, Parts]) -> bytes:
    """The content of the file CHECKSUMS."""
    head = {"format": FORMAT, "version": VERSION, "checksum_algorithm": ALGORITHM}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    listed = [f"  {json.dumps(name)}: {json.dumps(list(parts))}" for name, parts in sorted(files.items())]
    lines.append('"files": {\n' + ",\n".join(listed) + "\n}")
    content = (",\n".join(lines) + "\n}\n").encode()
    return _first_line(content) + b"\n" + content


def read_checksums(path: Path) -> Checksums | None:
    """Of the checkpoint at `path`, which may be a folder within the one that was written (an iteration of Megatron's).

    None: it was written without checksums. Raises CheckpointError for a damaged checksum file.
    """
    # The file is at the root of what was written: beside the checkpoint, or above an iteration's folder.
    for folder, prefix in ((path, ""), (path.parent, f"{path.name}/")):
        if (folder / CHECKSUMS).is_file():
            files = _read(folder / CHECKSUMS)
            within = {name: parts for name, parts in files.items() if name.startswith(prefix)}
            if within:
                return Checksums(folder, within)
    return None


def find_changes(checksums: Checksums, progress: Callable[[int], None] = lambda num_bytes: None) -> list[str]:
    """One sentence for each file that is missing or differs from what was written; empty if there is none.

    `progress` is called with the number of bytes just read.
    """
    problems = []
    for name, parts in checksums.files.items():
        try:
            _require_unchanged(checksums.folder / name, parts, progress)
        except CheckpointError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{checksums.folder / name}: cannot be read: {error.strerror or error}")
    return problems


def _require_unchanged(file: Path, parts: Parts, progress: Callable[[int], None]) -> None:
    check_size(file, sum(num_bytes for num_bytes, _ in parts))
    offset = 0
    for num_bytes, expected in parts:
        if checksum_range(file, offset, num_bytes, progress) != expected:
            raise CheckpointError(
                f"{file}: damaged: the bytes from {offset} to {offset + num_bytes} are not those that were written; "
                "copy or convert it again"
            )
        offset += num_bytes


def _read(file: Path) -> dict[str, Parts]:
    try:
        first_line, _, content = file.read_bytes().partition(b"\n")
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    if first_line != _first_line(content):
        raise CheckpointError(
            f"{file}: damaged: the checksum in its first line is not that of the other lines; without this file "
            "nothing is known of the bytes of the others"
        )
    return _files(file, parse_json(file, b"{" + content))


def _files(file: Path, content: Mapping[str, object]) -> dict[str, Parts]:
    found, files = (content.get("format"), content.get("version")), content.get("files")
    if found != (FORMAT, VERSION) or content.get("checksum_algorithm") != ALGORITHM or not isinstance(files, dict):
        raise CheckpointError(f"{file}: format {found[0]!r}, version {found[1]!r}; read is {FORMAT!r}, {VERSION}")
    for name in files:
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts:
            raise CheckpointError(f"{file}: lists {name!r}, which is not within its folder")
    return files


def _first_line(content: bytes) -> bytes:
    # The first line opens the JSON object, as in a manifest.
    return f'{{"checksum": "{checksum(content)}",'.encode()
