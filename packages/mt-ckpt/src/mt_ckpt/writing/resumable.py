"""A directory that is built file by file, can be resumed after a kill, and is renamed into place when complete.

It is built in `.mt-convert-<name>/content` beside its final place. `record.jsonl` in the same folder holds the
key of the work (what is converted, how) and a line with checksums for each finished file. Another process that
begins the same work keeps the finished files whose bytes still have those checksums; other work begins anew.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mt_ckpt.files.checksum import checksum, checksum_range
from mt_ckpt.files.checksum_file import CHECKSUMS, Parts, encode_checksums
from mt_ckpt.files.staging import sync_directory, write_file
from mt_core.errors import CheckpointError
from mt_core.paths import write_whole

PREFIX = ".mt-convert-"
RECORD = "record.jsonl"
Entry = dict[str, Any]
"""A line of the record about a file: its name, its parts and the saver's values."""


class ResumableFolder:
    """Made by `ResumableFolder(path, key)`; write into `content`, record each file by `finish`, then `commit`.

    `key` identifies the inputs; None: the work cannot be resumed. `close` in any case. Unfinished work
    stays for the next process unless it was committed. checksums: whether a file of checksums of all others goes along,
    since the format has none.
    """

    def __init__(self, path: Path, key: str | None, *, checksums: bool = True) -> None:
        """Raises CheckpointError when `path` is taken or another process is at work on it, and OSError."""
        require_free_folder(path)
        self.path = path
        self._checksums, self._small = checksums, dict[str, Parts]()
        self._folder = path.parent / f"{PREFIX}{path.name}"
        self.content = self._folder / "content"
        # Beside the target, hence on its file system, and under a name without randomness, which the next process
        # finds.
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self._folder)
        try:
            # With the lock held: no other process adds to the record.
            self._finished = self._begun(key)
            if not self._finished:
                self._clear()
            self._write_record(key)
        except BaseException:
            os.close(self._lock)
            raise

    def finished(self, name: str) -> Mapping[str, Any] | None:
        """What `finish` recorded about a file in `content` whose bytes are unchanged, else None."""
        entry = self._finished.get(name)
        file = self.content / name
        if entry is None or not file.is_file():
            return None
        parts = entry["parts"]
        if file.stat().st_size != sum(num_bytes for num_bytes, _ in parts):
            return None
        # A file may be damaged by the kill (not synced) or by hand: its bytes are compared, not its time.
        return entry["about"] if _intact(file, parts) else None

    def finish(self, name: str, parts: Parts, about: Mapping[str, Any] | None = None) -> None:
        """Record that a file is written and synced.

        parts: number of bytes and XXH3 checksum of what the file consists of, in order. about: JSON values that
        `finished` is to return.
        """
        self._finished[name] = entry = new_entry(name, parts, about)
        # Append and sync: a line is there completely or, after a kill, is a broken last line that `_parse` skips.
        with (self._folder / RECORD).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(entry) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def write_small(self, name: str, data: bytes) -> None:
        """Write and sync a file that is too small to be recorded for resuming."""
        (self.content / name).unlink(missing_ok=True)  # of a process that was killed
        write_file(self.content / name, data)
        self._small[name] = [(len(data), checksum(data))]

    def commit(self, names: set[str]) -> None:
        """Rename the content, which has to consist of the files `names`, to the final path. Raises OSError."""
        if self._checksums:
            self.write_small(CHECKSUMS, encode_checksums(checksums_of(names, self._finished, self._small)))
            names = {*names, CHECKSUMS}
        # Files of an attempt with another plan, or unfinished ones, do not belong to the result.
        for file in [entry for entry in self.content.rglob("*") if entry.is_file()]:
            if str(file.relative_to(self.content)) not in names:
                file.unlink()
        for folder, _, _ in os.walk(self.content):
            sync_directory(Path(folder))
        # Somebody may have made the target in the meantime; rename would replace an empty directory only.
        require_free_folder(self.path)
        self.content.rename(self.path)
        sync_directory(self.path.parent)
        # The lock file goes with it; the descriptor is still held, and closed by `close`.
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        os.close(self._lock)

    def _begun(self, key: str | None) -> dict[str, Entry]:
        """The finished files of the same work by name."""
        try:
            record = (self._folder / RECORD).read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        return finished_entries(record, key) if self.content.is_dir() else {}

    def _clear(self) -> None:
        shutil.rmtree(self.content, ignore_errors=True)
        self.content.mkdir()

    def _write_record(self, key: str | None) -> None:
        """Rewrite the record, without a partial line that a killed process may have left at its end."""
        write_whole(self._folder / RECORD, record_bytes(key, self._finished))
        sync_directory(self._folder)


def _intact(file: Path, parts: Parts) -> bool:
    offset = 0
    for num_bytes, expected in parts:
        if checksum_range(file, offset, num_bytes, lambda num_bytes: None) != expected:
            return False
        offset += num_bytes
    return True


def require_free_folder(path: Path) -> None:
    """Raises CheckpointError unless nothing, or an empty directory, is at `path`."""
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists() or path.is_symlink():
        raise CheckpointError(f"{path}: exists; converting replaces nothing: give another --save-dir or remove it")


# -- the record -------------------------------------------------------------------------------------


def work_key(*parts: Any) -> str:
    """A checksum of JSON values that say what is converted, and how."""
    return checksum(json.dumps(parts, sort_keys=True, default=str).encode())


def new_entry(name: str, parts: Parts, about: Mapping[str, Any] | None) -> Entry:
    return {"name": name, "parts": list(parts), "about": dict(about or {})}


def checksums_of(names: set[str], finished: Mapping[str, Entry], small: Mapping[str, Parts]) -> dict[str, Parts]:
    """The parts of each file."""
    return {name: small[name] if name in small else finished[name]["parts"] for name in names}


def record_bytes(key: str | None, finished: Mapping[str, Entry]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in [{"key": key}, *finished.values()]).encode()


def finished_entries(record: str, key: str | None) -> dict[str, Entry]:
    """The finished files by name; {} of other work."""
    entries = [_parse(line) for line in record.splitlines()]
    # Two works without a key are not the same work, although their records begin alike.
    if key is None or not entries or entries[0] != {"key": key}:
        return {}
    return {entry["name"]: entry for entry in entries[1:] if "name" in entry}


def _parse(line: str) -> Entry:
    """An entry of the record; {} for a line that a killed process left unfinished."""
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _lock(folder: Path) -> int:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise CheckpointError(f"{folder}: another process is converting to the same place") from None
    except OSError:  # the file system has no locks
        # Without locks two processes are not noticed; the conversion still works.
        return descriptor
    return descriptor
