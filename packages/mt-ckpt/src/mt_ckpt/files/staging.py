"""A directory that appears under its final name only when all its contents are on the disk.

It is built in `.tmp-mt-<name>-<random>/content` beside its final place and renamed. A lock file in the
staging directory is held (flock) while its process lives, so that what a killed process left behind can
be distinguished from work in progress, also by processes of other containers.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from mt_core.paths import sync_directory

STAGING_PREFIX = ".tmp-mt-"
# Of <fcntl.h> and <linux/fs.h>: paths relative to the working directory; swap both names.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class Staging:
    """Made by `Staging(path)`; write into `content`, then `commit`; `close` in any case."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when the directory of `path` cannot be made or written."""
        self.path = path
        _make_directories(path.parent)
        remove_leftovers(path.parent)
        self._folder, self._lock = _make_locked(path)
        self.content = self._folder / "content"
        try:
            self.content.mkdir()
        except OSError:
            self.close()
            raise

    def commit(self) -> None:
        """Rename the content to `path`, in the place of a directory of that name if there is one.

        All files in it must have been synced. Raises OSError; `path` is then the old or the new one, whole.
        """
        # fsync of a file does not cover its name. The entries of every directory have to be on the disk before the
        # rename makes them visible.
        for folder, _, _ in os.walk(self.content):
            sync_directory(Path(folder))
        if self.path.exists():
            _replace(self.content, self.path, self._folder / "replaced")
        else:
            self.content.rename(self.path)
        # The rename itself is an entry of the parent directory.
        sync_directory(self.path.parent)

    def close(self) -> None:
        """Remove the staging directory and what was replaced."""
        # The lock is released after the removal, else another process could take the folder for a leftover.
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)


def remove_leftovers(folder: Path) -> None:
    """Remove the staging directories in `folder` whose processes are gone.

    One that was killed while it replaced a directory is finished first.
    """
    for leftover in folder.glob(f"{STAGING_PREFIX}*"):
        try:
            lock = _try_lock(leftover)
        except OSError:  # the file system has no locks, or it is gone already: leave it alone
            continue
        if lock is None:
            continue
        # The lock was free: the kernel releases a flock with the last descriptor that holds it, however the process
        # ends.
        _finish_replacing(leftover)
        shutil.rmtree(leftover, ignore_errors=True)
        os.close(lock)


def write_file(file: Path, data: bytes) -> None:
    """Write a whole file and sync it; the directories above it are made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        # "x": a name is written once per checkpoint; an existing file is an error in the caller.
        with file.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        error.filename = str(file)
        raise


def sync_file(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_directories(folder: Path) -> None:
    if not folder.exists():
        _make_directories(folder.parent)
        # exist_ok: another rank or run may make the same directory at the same time. Each new name is synced in its
        # parent.
        folder.mkdir(exist_ok=True)
        sync_directory(folder.parent)


def _make_locked(path: Path) -> tuple[Path, int | None]:
    """A new staging directory beside `path`, and the descriptor of its lock; None where the file system has no locks.

    Until the lock is held, another process may take the directory for a leftover and remove it; another is then made.
    """
    while True:
        # In the directory of `path`, hence on the same file system: rename cannot move to another one.
        folder = Path(tempfile.mkdtemp(prefix=f"{STAGING_PREFIX}{path.name}-", dir=path.parent))
        try:
            lock = _try_lock(folder)
        except FileNotFoundError:  # removed before the lock file was made
            continue
        except OSError:
            return folder, None
        if lock is None:  # held by the process that removes it
            continue
        # A lock file without a name was removed between open and flock, and its directory with it.
        if os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)


def _try_lock(staging: Path) -> int | None:
    """An open descriptor that holds the lock, or None when a living process holds it."""
    # A flock belongs to the open descriptor, so the descriptor is returned and kept open while the lock is needed.
    descriptor = os.open(staging / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor


def _replace(new: Path, path: Path, aside: Path) -> None:
    """Put `new` in the place of `path`; the old one ends at `new` or at `aside`."""
    if _exchange(new, path):
        return
    # Between the two renames nothing has the name `path`. `_finish_replacing` completes this when the process dies
    # here.
    path.rename(aside)
    try:
        new.rename(path)
    except OSError:
        # The old checkpoint gets its name back.
        aside.rename(path)
        raise


def _exchange(first: Path, second: Path) -> bool:
    """Swap two directories in one step; False where the system or the file system cannot (Linux and ext4,
    xfs, btrfs, tmpfs can; Python has no call for it)."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    # Kernel or file system (NFS, some FUSE) without the flag; any other error is one of the disk.
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(second))


def _finish_replacing(staging: Path) -> None:
    """Put the new directory in its place if the process died after it had moved the old one aside."""
    # mkdtemp's random part has no hyphen, so the last hyphen separates it from the name, which may have some.
    name = staging.name.removeprefix(STAGING_PREFIX).rpartition("-")[0]
    path = staging.parent / name
    if (staging / "replaced").exists() and not path.exists():
        (staging / "content").rename(path)
        sync_directory(path.parent)
