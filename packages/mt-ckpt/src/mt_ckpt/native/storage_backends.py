"""How the ranks of a run assemble a checkpoint, so that it appears only when it is complete.

On a file system: a staging directory beside the final place, renamed at the end. In an object store, which cannot
rename: the final place, where the manifest is written last; the shards of each attempt have unique names.
Ranks report to the first rank through files, since they write in threads while training continues.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from mt_ckpt.files.staging import STAGING_PREFIX, Staging, write_file
from mt_ckpt.native.manifest import MANIFEST_NAME
from mt_core.paths import children, is_remote, remove_tree, write_whole

REPORTS = ".reports"
END = b"\n"
"""Ending of a report where nothing can be renamed: some of fsspec's file systems show a file while it is written.
The JSON before it has no line breaks."""
POLL_SECONDS = 0.005, 0.5
"""Polling interval for the reports of other ranks: it grows from the first to the second value."""


class Place(Protocol):
    """One attempt to write one checkpoint, as one rank sees it."""

    @property
    def folder(self) -> Path:
        """A local folder for this rank's shards."""
        ...

    @property
    def prefix(self) -> str:
        """Prefix of the names of this attempt's shards."""
        ...

    def shard_on_disk(self, file: Path) -> None:
        """Called when a shard in `folder` is complete."""
        ...

    def report(self, rank: int, content: bytes) -> None:
        """Report to the first rank that this rank's shards are in place."""
        ...

    def reports(self) -> Mapping[int, bytes]:
        """The reports received so far, by rank."""
        ...

    def commit(self, small: Mapping[str, bytes], manifest: bytes) -> None:
        """On the first rank, after all have reported: the checkpoint appears."""
        ...


class StagedPlace:
    """On a file system that ranks share."""

    prefix = ""

    def __init__(self, staging: Path) -> None:
        self.folder = staging / "content"
        self._reports = staging / REPORTS

    # It is in its final file already; only the rename of the folder is left.
    def shard_on_disk(self, file: Path) -> None: ...

    def report(self, rank: int, content: bytes) -> None:
        # Renamed into place from a name that is not a number, which `_reports_in` skips.
        write_whole(self._reports / str(rank), content)

    def reports(self) -> Mapping[int, bytes]:
        return _reports_in(self._reports)


class FirstRanksPlace(StagedPlace):
    """The same on the rank that made it, and holds it until it is committed or closed."""

    def __init__(self, staging: Staging) -> None:
        super().__init__(staging.content.parent)
        self._staging = staging

    def commit(self, small: Mapping[str, bytes], manifest: bytes) -> None:
        # MANIFEST_NAME is last in the dictionary.
        for name, data in {**small, MANIFEST_NAME: manifest}.items():
            write_file(self.folder / name, data)
        self._staging.commit()

    def close(self) -> None:
        self._staging.close()


class RemotePlace:
    """In an object store. Shards are written to this machine's temporary directory and sent from there one by one."""

    def __init__(self, path: Any, token: str) -> None:
        self._path = path
        self.prefix = f"{token}-"
        self._local = tempfile.TemporaryDirectory(prefix="mt-ckpt-")
        self.folder = Path(self._local.name)

    def shard_on_disk(self, file: Path) -> None:
        # The local copy is removed as soon as it is sent: the temporary directory needs space for a few shards, not for
        # the checkpoint.
        self._path.fs.put_file(str(file), (self._path / file.name).path)
        file.unlink()

    def report(self, rank: int, content: bytes) -> None:
        (self._path / REPORTS).mkdir(parents=True, exist_ok=True)
        (self._path / REPORTS / f"{self.prefix}{rank}").write_bytes(content + END)

    def reports(self) -> Mapping[int, bytes]:
        contents = _reports_in(self._path / REPORTS, self.prefix)
        return {rank: content.removesuffix(END) for rank, content in contents.items() if content.endswith(END)}

    def commit(self, small: Mapping[str, bytes], manifest: bytes) -> None:
        # The manifest is last: until it exists, `detect` sees no checkpoint. Only then are the older shards removed.
        for name, data in {**small, MANIFEST_NAME: manifest}.items():
            (self._path / name).parent.mkdir(parents=True, exist_ok=True)
            (self._path / name).write_bytes(data)
        if (self._path / REPORTS).exists():
            remove_tree(self._path / REPORTS)
        for file in list(children(self._path)):
            if file.name.endswith(".safetensors") and not file.name.startswith(self.prefix):
                file.unlink()  # of an attempt that was never committed, or of what this one replaces

    def close(self) -> None:
        self._local.cleanup()


def begin(path: Path) -> tuple[str, FirstRanksPlace | RemotePlace]:
    """On the first rank: makes the place; the string is its place, for other ranks. Raises OSError."""
    if is_remote(path):
        # Removed first: small files of the new checkpoint replace those of the old one, whose manifest has their
        # checksums.
        (path / MANIFEST_NAME).unlink(missing_ok=True)  # what is replaced is no checkpoint any more
        path.mkdir(parents=True, exist_ok=True)
        token = secrets.token_hex(4)
        return token, RemotePlace(path, token)
    staging = Staging(path)
    # The name of the staging directory is the token: other ranks derive the path from it.
    return staging.content.parent.name, FirstRanksPlace(staging)


@contextmanager
def joined(path: Path, token: str) -> Iterator[StagedPlace | RemotePlace]:
    """On another rank: the place that the first one has made."""
    if not is_remote(path):
        assert token.startswith(STAGING_PREFIX)
        yield StagedPlace(path.parent / token)
        return
    place = RemotePlace(path, token)
    try:
        yield place
    finally:
        place.close()


def wait_for_reports(place: StagedPlace | RemotePlace, num_ranks: int) -> Mapping[int, bytes]:
    """The reports of all ranks; polls until they are complete. A rank that died sends none: the launcher ends this
    one."""
    pause, longest = POLL_SECONDS
    while len(reports := place.reports()) < num_ranks:
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return reports


def _reports_in(folder: Path, prefix: str = "") -> dict[int, bytes]:
    # The prefix contains the token of this attempt, so that reports of an interrupted one are not counted.
    names = {file.name.removeprefix(prefix): file for file in children(folder) if file.name.startswith(prefix)}
    return {int(name): file.read_bytes() for name, file in names.items() if name.isdecimal()}
