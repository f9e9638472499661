"""The checksum file of a conversion's output, for formats without checksums.

It is JSON of the kind of a manifest: the first line holds the checksum of all other bytes, then come for each file its
parts in order, each with its number of bytes and its XXH3 checksum. Readers of the formats ignore it.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path, PurePosixPath

from mt_ckpt.files.checksum import ALGORITHM, check_size, checksum, checksum_range, parse_json
from mt_core.errors import CheckpointError

CHECKSUMS = "mt-checksums.json"
FORMAT, VERSION = "mt-checksums", 1
Parts = Sequence[tuple[int, str]]
"""Number of bytes and checksum of what a file consists of, in order."""


def _ignore(num_bytes: int) -> None:
    """Progress that nobody is shown."""


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
    """The checksums of the checkpoint at `path`.

    That may be a folder within the one that was written (an iteration of Megatron's). None: it was written without
    checksums. Raises CheckpointError for a damaged checksum file.
    """
    # The file is at the root of what was written: beside the checkpoint, or above an iteration's folder.
    for folder, prefix in ((path, ""), (path.parent, f"{path.name}/")):
        if (folder / CHECKSUMS).is_file():
            files = _read(folder / CHECKSUMS)
            within = {name: parts for name, parts in files.items() if name.startswith(prefix)}
            if within:
                return Checksums(folder, within)
    return None


def find_changes(checksums: Checksums, progress: Callable[[int], None] = _ignore) -> list[str]:
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


class WrittenFiles:
    """The files of a checkpoint, whose content is compared with the checksums that its conversion wrote before it is
    used. Without a file of checksums, as in folders of other programs, files are read as they are.

    Opening compares sizes, `read` is for small files, and `require` for what was read of a large one.
    """

    def __init__(self, path: Path) -> None:
        """path: of the checkpoint. Raises CheckpointError for a damaged file of checksums, and for a listed file that
        is missing or has another size."""
        self._checksums = read_checksums(path)
        self._offsets: dict[str, list[int]] = {}
        for name, parts in self._listed.items():
            try:
                check_size(self._folder / name, sum(num_bytes for num_bytes, _ in parts))
            except CheckpointError as error:
                raise CheckpointError(f"{error}; {self._remedy}") from None

    @property
    def _listed(self) -> Mapping[str, Parts]:
        return {} if self._checksums is None else self._checksums.files

    @property
    def _folder(self) -> Path:
        assert self._checksums is not None
        return self._checksums.folder

    @property
    def _remedy(self) -> str:
        return (
            "copy or convert the checkpoint again, or remove "
            f"{self._folder / CHECKSUMS} if the files were changed on purpose"
        )

    def read(self, file: Path) -> bytes:
        """The whole content of a small file. Raises CheckpointError where it differs, and OSError."""
        data = file.read_bytes()
        self.require(file, 0, memoryview(data))
        return data

    def require(self, file: Path, offset: int, data: memoryview) -> None:
        """Raises CheckpointError unless `data`, read from `offset` of `file`, is what was written there.

        Parts of the file of which `data` has only some bytes are read as a whole.
        """
        for begin, num_bytes, expected in self._parts_within(file, offset, offset + len(data)):
            if offset <= begin and begin + num_bytes <= offset + len(data):
                actual = checksum(data[begin - offset : begin - offset + num_bytes])
            else:
                actual = checksum_range(file, begin, num_bytes, _ignore)
            if actual != expected:
                raise CheckpointError(
                    f"{file}: damaged: the bytes from {begin} to {begin + num_bytes} are not those that were written "
                    f"({CHECKSUMS}); {self._remedy}"
                )

    def _parts_within(self, file: Path, begin: int, end: int) -> Iterator[tuple[int, int, str]]:
        """The offset, number of bytes and checksum of parts with bytes in [begin, end); none of unlisted files."""
        if self._checksums is None or not file.is_relative_to(self._folder):
            return
        name = file.relative_to(self._folder).as_posix()
        parts = self._listed.get(name, ())
        if name not in self._offsets:
            self._offsets[name] = list(accumulate((num_bytes for num_bytes, _ in parts), initial=0))
        offsets = self._offsets[name]
        # A file has thousands of parts and is asked for each of them: the first is found without going through all.
        number = max(bisect_right(offsets, begin) - 1, 0)
        while number < len(parts) and offsets[number] < end:
            yield offsets[number], *parts[number]
            number += 1


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
    header, files = (content.get("format"), content.get("version")), content.get("files")
    if header != (FORMAT, VERSION) or content.get("checksum_algorithm") != ALGORITHM or not isinstance(files, dict):
        raise CheckpointError(f"{file}: format {header[0]!r}, version {header[1]!r}; read is {FORMAT!r}, {VERSION}")
    for name in files:
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts:
            raise CheckpointError(f"{file}: lists {name!r}, which is not within its folder")
    return files


def _first_line(content: bytes) -> bytes:
    # The first line opens the JSON object, as in a manifest.
    return f'{{"checksum": "{checksum(content)}",'.encode()
