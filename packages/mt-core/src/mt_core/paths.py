"""Paths of this machine and of object stores.

A path is local, or reads scheme://... and is one of fsspec's file systems (s3, gs, az, hdfs, ...), as universal_pathlib
makes them: `/`, open, read_bytes, iterdir and so on work on both. `is_remote` distinguishes object
stores, which cannot rename and sync.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mt_core.errors import ConfigError


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Raises ConfigError where the file or folder of a command's option cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror or error}") from error


def as_path(location: str | Path) -> Path:
    """The path that a user wrote.

    Raises ConfigError for a URL when universal_pathlib, or the package of its scheme, is not installed.
    """
    if not isinstance(location, str) or "://" not in location:
        return Path(location) if isinstance(location, str) else location
    try:
        from upath import UPath
    except ImportError:
        raise ConfigError(
            f'{location}: paths of object stores need universal_pathlib: pip install "mt-core[remote]"'
        ) from None
    scheme = location.partition("://")[0]
    try:
        # Without a cache: others write there too, since ranks wait for one another's files.
        path: Any = UPath(location, use_listings_cache=False)
        # The package of the scheme is imported at the first access; here its absence can be reported.
        _ = path.fs
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{location}: {scheme}:// cannot be used: {error}") from error
    return path


def is_remote(path: Path) -> bool:
    """Whether a path is one of an object store, which has no renaming and no locks."""
    # A UPath of an object store is no pathlib.Path.
    return not isinstance(path, Path)


def absolute(path: Path) -> Path:
    """A local path from the root on; others are."""
    return path if is_remote(path) else Path(os.path.abspath(path))


def children(folder: Path) -> Iterator[Path]:
    """What is in a folder; nothing if it does not exist."""
    try:
        yield from folder.iterdir()
    except (FileNotFoundError, NotADirectoryError):
        return


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that readers see the old content or all of the new one. The directories above it are made.

    Raises OSError; nothing under the name has changed then.
    """
    if is_remote(path):
        path.write_bytes(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same directory, so that replace() stays on one file system and is atomic. Ranks have other process ids.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            # Before the rename: after a power failure the new name must not stand for an empty file.
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def sync_directory(folder: Path) -> None:
    """Until the names in a local folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(folder: Path) -> None:
    """Remove a folder and everything in it. Raises OSError."""
    if is_remote(folder):
        folder.fs.rm(folder.path, recursive=True)  # type: ignore[attr-defined]
    else:
        shutil.rmtree(folder)
