"""Where a conversion writes: a local folder, or one in an object store, which can neither rename nor append."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mt_ckpt.files.checksum import checksum
from mt_ckpt.files.checksum_file import CHECKSUMS, Parts, encode_checksums
from mt_ckpt.writing.resumable import (
    RECORD,
    Entry,
    ResumableFolder,
    checksums_of,
    finished_entries,
    new_entry,
    record_bytes,
    require_free_folder,
)
from mt_core.checkpoint_specs import CheckpointSaverSpec
from mt_core.errors import CheckpointError, ConfigError
from mt_core.paths import absolute, as_path, children, is_remote, remove_tree

REMOTE_RECORD = f".mt-convert-{RECORD}"


class RemoteFolder:
    """What `ResumableFolder` is on a disk: files are made in `content`, in this machine's temporary directory, and sent
    to their place one by one. Small files are sent last, in the order in which they were written: the last of them is
    the one that makes it a checkpoint. Until then a record lies beside the files that were sent, by which another
    process resumes; there is no lock against two processes that write to one place at the same time.
    """

    def __init__(self, path: Any, key: str | None, *, checksums: bool = True) -> None:
        """Raises CheckpointError when something else is at `path`, and OSError."""
        require_free_place(path)
        self.path, self._key, self._checksums = path, key, checksums
        self._finished = self._begun()
        # Of another key, or none: what lies there belongs to work that will not be resumed.
        if not self._finished and self._record.exists():
            remove_tree(path)
        path.mkdir(parents=True, exist_ok=True)
        self._write_record()
        self._small: dict[str, bytes] = {}
        self._local = TemporaryDirectory(prefix="mt-convert-")
        self.content = Path(self._local.name)

    def finished(self, name: str) -> Mapping[str, Any] | None:
        """What `finish` recorded about a file that has been uploaded, if it exists with the same size, else None."""
        entry = self._finished.get(name)
        # Sizes only: comparing checksums would fetch what was sent.
        if entry is None or _size(self.path / name) != sum(num_bytes for num_bytes, _ in entry["parts"]):
            return None
        about: Mapping[str, Any] = entry["about"]
        return about

    def finish(self, name: str, parts: Parts, about: Mapping[str, Any] | None = None) -> None:
        """Upload a file of `content`, delete it locally and record it; arguments as of `ResumableFolder.finish`."""
        self.path.fs.put_file(str(self.content / name), (self.path / name).path)
        (self.content / name).unlink()
        self._finished[name] = new_entry(name, parts, about)
        self._write_record()

    def write_small(self, name: str, data: bytes) -> None:
        """Keep a file for `commit`."""
        self._small[name] = data

    def commit(self, names: set[str]) -> None:
        """Upload the small files. Raises OSError."""
        assert names == {*self._finished, *self._small}
        # A kill between two of these leaves the record, and with it a place that may be written again.
        for name, data in {**self._checksum_file(names), **self._small}.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_bytes(data)
        # Last: without the record the place counts as taken.
        self._record.unlink()

    def _checksum_file(self, names: set[str]) -> dict[str, bytes]:
        if not self._checksums:
            return {}
        small = {name: [(len(data), checksum(data))] for name, data in self._small.items()}
        return {CHECKSUMS: encode_checksums(checksums_of(names, self._finished, small))}

    def close(self) -> None:
        self._local.cleanup()

    @property
    def _record(self) -> Any:
        return self.path / REMOTE_RECORD

    def _begun(self) -> dict[str, Entry]:
        try:
            return finished_entries(self._record.read_text(encoding="utf-8"), self._key)
        except FileNotFoundError:
            return {}

    def _write_record(self) -> None:
        self._record.write_bytes(record_bytes(self._key, self._finished))


def require_free_place(path: Any) -> None:
    """Raises CheckpointError unless nothing is at `path`, or what a conversion left that did not come to its end."""
    names = [entry.name for entry in children(path)]
    if path.is_file() or (names and REMOTE_RECORD not in names):
        raise CheckpointError(f"{path}: exists; converting replaces nothing: give another --save-dir or remove it")


def _size(file: Any) -> int | None:
    try:
        return int(file.stat().st_size)
    except FileNotFoundError:
        return None


OutputFolder = ResumableFolder | RemoteFolder


def target_path(save_dir: str | Path, saver: CheckpointSaverSpec) -> Path:
    """The absolute target. Raises ConfigError for the address of an object store in a format that needs a disk."""
    path = absolute(as_path(save_dir))
    if is_remote(path) and not saver.converts_to_addresses:
        raise ConfigError(
            f"--save-dir {save_dir}: --saver {saver.name} writes local folders; copy the result there (mt and hf write "
            "to addresses)"
        )
    return path


def require_free(path: Path) -> None:
    """Raises CheckpointError if the target exists."""
    (require_free_place if is_remote(path) else require_free_folder)(path)


def output_folder(path: Path, key: str | None, *, checksums: bool = True) -> OutputFolder:
    """The folder that becomes `path`; key: identifies its inputs, None: it cannot be resumed after a kill.

    checksums: whether a file of checksums of all others goes along, since the format has none.
    """
    return (RemoteFolder if is_remote(path) else ResumableFolder)(path, key, checksums=checksums)
