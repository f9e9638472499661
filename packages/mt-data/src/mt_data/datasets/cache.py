"""Cache of folders that can be built again, named by the fingerprints of their inputs; indices in it.

An entry is written under a temporary name and renamed, so that it is there whole or not at all; one that
fails its check is made again. Jobs that share a disk wait for one another where the file system can lock,
and otherwise do the same work twice without harm.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError

T = TypeVar("T")
FORMAT = 1
"""Raised when entries of an older program must not be used any more."""
LEFTOVER_SECONDS = 24 * 3600
log = logging.getLogger(__name__)


class DamagedEntryError(Exception):
    """An entry does not hold what it should; the message says what is wrong."""


# What damaged JSON and arrays raise in the callers' `read`: wrong values, missing keys, null in place of an object.
_UNREADABLE = (DamagedEntryError, DataError, OSError, ValueError, KeyError, TypeError, AttributeError)


class ContentCache:
    """Entries in one folder, which is made when the first one is written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def get(self, key: Mapping[str, Any], write: Callable[[Path], None], read: Callable[[Path], T]) -> T:
        """What `read(folder)` returns of the entry for `key`, after `write(folder)` made it if need be.

        key: JSON values that decide the content. read raises DamagedEntryError (or another error that files
        cause) for an entry that is not whole. Raises OSError when the entry has to be made and cannot be.
        """
        entry = self.directory / entry_name(key)
        if (value := _read(entry, read)) is not None:
            return value
        _make_directory(self.directory)
        lock = self.directory / f"{entry.name}.lock"
        with _locked(lock):
            # Another job may have made it while this one waited.
            if (value := _read(entry, read)) is not None:
                return value
            self._make(entry, key, write, read)
            # A job that waits for this file finds the entry; one that comes later needs no lock.
            lock.unlink(missing_ok=True)
        return read(entry)

    def _make(
        self, entry: Path, key: Mapping[str, Any], write: Callable[[Path], None], read: Callable[[Path], T]
    ) -> None:
        _remove_leftovers(entry)
        # In the same folder, hence on the same file system: rename is atomic only there.
        temporary = Path(tempfile.mkdtemp(prefix=f"{entry.name}.tmp-", dir=self.directory))
        try:
            write(temporary)
            # For people: the folder's name is a hash, from which the parameters cannot be read.
            (temporary / "key.json").write_text(json.dumps(key, indent=1))
            # mkdtemp makes folders for the owner alone; users of one group share a cache.
            temporary.chmod(0o777 & ~_umask())
            _move_into_place(temporary, entry, read)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def entry_name(key: Mapping[str, Any]) -> str:
    """Folder name of an entry: SHA-256 over canonical JSON of the key."""
    # NaN is no JSON, and unequal to itself: it would be a key that readers disagree on.
    text = json.dumps({"format": FORMAT, "key": key}, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(entry: Path, read: Callable[[Path], T]) -> T | None:
    if not entry.is_dir():
        return None
    try:
        return read(entry)
    except _UNREADABLE as error:
        log.warning("cache entry %s is damaged (%s); it is made again", entry, error)
        return None


def _remove_leftovers(entry: Path) -> None:
    """Remove what killed jobs began: nobody has written there for a day, on whichever machine the job was."""
    for folder in entry.parent.glob(f"{entry.name}.tmp-*"):
        with suppress(OSError):  # another job may remove it at the same time
            if time.time() - max(path.stat().st_mtime for path in [folder, *folder.rglob("*")]) > LEFTOVER_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _move_into_place(temporary: Path, entry: Path, read: Callable[[Path], T]) -> None:
    """Rename. An entry that is there already is damaged, unless a job that could not lock just made it."""
    try:
        temporary.rename(entry)
    except OSError:
        if _read(entry, read) is not None:
            return
        # A directory that is not empty cannot be replaced by rename, so the damaged one is moved away first and then
        # removed. A job that has mapped its files keeps them until it unmaps.
        with tempfile.TemporaryDirectory(prefix=f"{entry.name}.old-", dir=entry.parent) as aside:
            entry.rename(Path(aside, "damaged"))
        temporary.rename(entry)


def _umask() -> int:
    # There is no call that only reads the mask.
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # some network file systems say so although it is a folder
        if not directory.is_dir():
            raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock, which ends with the process; none where the system or the file system has none."""
    with path.open("ab") as file:
        _lock(file.fileno(), path)
        yield


def _lock(descriptor: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows; renames alone keep entries whole
        return
    try:
        # Without waiting first, so that a wait is logged.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("waiting for another job that makes the same cache entry (%s)", path)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        log.info("%s cannot be locked; another job may do the same work", path)


# -- indices, found again by what they were built from -----------------------------------------------
#
# An entry of the cache holds one `.npy` file an array, and `manifest.json` with the arrays' shapes, dtypes and
# checksums, which are verified each time. Where nothing can be written the index is built in memory.

Arrays = Mapping[str, NDArray[Any]]
MANIFEST = "manifest.json"
_CHUNK = 1 << 24


class IndexCache:
    """Named arrays by key, in one folder; directory None keeps nothing."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory

    def get(self, key: Mapping[str, Any], build: Callable[[], Arrays]) -> dict[str, NDArray[Any]]:
        """The arrays of `key`: read (memory-mapped, read-only, checked), or else built and written.

        key: JSON values that decide the arrays, the content fingerprint of the data among them.
        """
        if self.directory is None:
            return dict(build())
        built: dict[str, NDArray[Any]] = {}

        def write(folder: Path) -> None:
            # Kept outside: when the entry cannot be written or read back, the finished arrays are used from memory.
            built.update(build())
            _write_arrays(folder, built)

        try:
            return ContentCache(self.directory).get(key, write, _read_arrays)
        except (OSError, DamagedEntryError) as error:
            log.warning("index cache %s cannot be used (%s); the index stays in memory", self.directory, error)
            return built or dict(build())


def _write_arrays(folder: Path, arrays: Arrays) -> None:
    facts = {name: _write_array(folder / f"{name}.npy", array) for name, array in arrays.items()}
    with (folder / MANIFEST).open("w") as file:
        json.dump(facts, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _write_array(path: Path, array: NDArray[Any]) -> dict[str, Any]:
    with path.open("wb") as file:
        # Into an open file, so that it can be synced; np.save closes its own.
        np.lib.format.write_array(file, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    return {
        "shape": list(array.shape),
        "dtype": array.dtype.str,
        "bytes": path.stat().st_size,
        "sha256": _checksum(path),
    }


def _read_arrays(folder: Path) -> dict[str, NDArray[Any]]:
    manifest = json.loads((folder / MANIFEST).read_text())
    return {name: _read_array(folder / f"{name}.npy", facts) for name, facts in manifest.items()}


def _read_array(path: Path, facts: Mapping[str, Any]) -> NDArray[Any]:
    if (size := path.stat().st_size) != facts["bytes"]:
        raise DamagedEntryError(f"{path.name} has {size} bytes in place of {facts['bytes']}")
    # Read whole once per process and index: a flipped bit would otherwise change which tokens are trained on without
    # notice.
    if (digest := _checksum(path)) != facts["sha256"]:
        raise DamagedEntryError(f"{path.name} has the SHA-256 {digest} in place of {facts['sha256']}")
    array = np.lib.format.open_memmap(path, mode="r")
    if list(array.shape) != facts["shape"] or array.dtype.str != facts["dtype"]:
        raise DamagedEntryError(f"{path.name} holds {array.dtype}{list(array.shape)}")
    # A plain array: indexing np.memmap costs several times as much.
    return array.view(np.ndarray)


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


# -- fingerprints of the inputs of data sets ---------------------------------------------------------


def combined(parts: Sequence[Any]) -> str:
    """SHA-256 (hexadecimal) over JSON values, in their order."""
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def file_checksum(path: Path) -> str:
    """SHA-256 (hexadecimal) of a file. Raises DataError when it cannot be read."""
    try:
        with path.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


# -- progress bar, shown after the first second and only on a terminal -------------------------------

SILENT_SECONDS = 1.0


@contextmanager
def index_progress(title: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """Yields `update(done, total)`; without a terminal one line is logged when the work took long."""
    from rich.progress import Progress  # drawn rarely, and slow to import

    start = time.monotonic()
    bar = Progress(transient=True, disable=not sys.stderr.isatty())
    task = bar.add_task(title, total=total)

    def update(done: int, total: int) -> None:
        # Started late instead of at once: most indices are built in less than a second, and a bar would only flicker.
        if not bar.live.is_started and time.monotonic() - start > SILENT_SECONDS:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield update
    finally:
        bar.stop()
        if (seconds := time.monotonic() - start) > SILENT_SECONDS:
            log.info("%s: built in %.1f s", title, seconds)
