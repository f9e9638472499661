"""Files that appear under their name only when they are complete."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256

import numpy as np
from numpy.typing import ArrayLike

from mt_core.errors import DataError
from mt_data.indexed.manifest import BlockChecksummer, FileRecord
from mt_data.indexed.storage import CHUNK_BYTES

SUFFIX = ".tmp"
BUFFER_BYTES = 1 << 20
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class PendingFile:
    """Writes `<path>.tmp`, hashing on the way; `publish` gives it its name.

    blocks: take the checksums of its blocks too.
    The temporary name is fixed and locked: a second writer is refused, and what a killed one left is used again.
    Raises OSError as files do, and DataError when another process is writing the same file.
    """

    def __init__(self, path: str, *, blocks: bool = False) -> None:
        self.path = path
        self.temporary = path + SUFFIX
        self._file = open(_open_locked(self.temporary, path), "wb", buffering=BUFFER_BYTES)  # noqa: SIM115
        # Hashed while it is written: reading the file back for its checksum would double the I/O of a large merge.
        self._digest = sha256()
        self.blocks = BlockChecksummer() if blocks else None
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append the bytes of a C-ordered buffer of any element type."""
        # cast refuses views with a 0 in their shape, which an empty array has.
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        self._file.write(view)
        self._digest.update(view)
        if self.blocks is not None:
            self.blocks.update(view)
        self.size += len(view)

    def record(self) -> FileRecord:
        return FileRecord(size=self.size, sha256=self._digest.hexdigest())

    def sync(self) -> None:
        """Put everything written on the disk."""
        # fsync covers only what has left Python's buffer.
        self._file.flush()
        os.fsync(self._file.fileno())

    def publish(self) -> None:
        """Rename to the final name, in place of a file that is there, and close (which ends the lock)."""
        # Rename before close: the lock is held until the name is final, so no second writer can take the temporary
        # between.
        os.replace(self.temporary, self.path)
        self._file.close()

    def discard(self) -> None:
        """Remove what was written, under whichever name."""
        try:
            # Closed means published: an error in a later file of the set takes this one back under its final name.
            os.unlink(self.path if self._file.closed else self.temporary)
        finally:
            # Closing writes the buffer's rest, which may not fit on the disk, and is not needed.
            with suppress(OSError):
                self._file.close()


class SpooledArray:
    """A growing array of one dtype, in memory while small, then in a nameless file in `folder`."""

    def __init__(self, dtype: np.dtype, folder: str) -> None:
        self.dtype = dtype
        self._recent: list[int] = []
        # In the output's folder, not in /tmp: the arrays of a large corpus exceed what a tmpfs holds.
        self._file = tempfile.SpooledTemporaryFile(max_size=CHUNK_BYTES, dir=folder)  # noqa: SIM115
        self._spooled = 0

    def __len__(self) -> int:
        return self._spooled + len(self._recent)

    def append(self, value: int) -> None:
        self._recent.append(value)
        # Single values are collected in a list first; a write per value would dominate the time of small sequences.
        if len(self._recent) >= 1 << 14:
            self._flush()

    def extend(self, values: ArrayLike) -> None:
        self._flush()
        array = np.ascontiguousarray(values, self.dtype)
        self._file.write(array.tobytes())
        self._spooled += len(array)

    def _flush(self) -> None:
        if self._recent:
            recent, self._recent = self._recent, []
            self.extend(recent)

    def chunks(self) -> Iterator[np.ndarray]:
        """The values from the first on, in arrays of at most CHUNK_BYTES. Nothing may be added meanwhile."""
        self._flush()
        self._file.seek(0)
        while data := self._file.read(CHUNK_BYTES):
            yield np.frombuffer(data, self.dtype)
        # Back to the end, where the next append writes; chunks() is called twice for the lengths.
        self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self._file.close()


# A rename survives a crash of the machine only when the directory itself has been synced; fsync of the file covers its
# content alone.
def sync_folder(path: str) -> None:
    """Put the names in a file's folder on the disk."""
    descriptor = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_locked(temporary: str, path: str) -> int:
    """A descriptor of the empty file `temporary`, locked for this process."""
    # 1. open or create the file; 2. lock it without waiting; 3. check that the name still refers to the locked file.
    # Step 3 fails when the former holder renamed or removed the file between 1 and 2: its lock is then on a file that
    # is final, and truncating it would destroy finished data. The loop opens the name anew.
    while True:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _lock(descriptor, path)
            # The holder of the lock may have given the file its final name, or removed it, before we got the lock.
            if _is_same_file(descriptor, temporary):
                # Not O_TRUNC at open, which would empty the file of a process that holds the lock.
                os.ftruncate(descriptor, 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, path: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DataError(
            f"another process is writing {path} ({path}{SUFFIX} is locked); wait for it, or choose another prefix"
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:  # some network file systems are mounted without locks
            raise


def _is_same_file(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
