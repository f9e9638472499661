"""Where the bytes of an indexed dataset lie: mapped files, files read plainly, objects in a store.

The three have one interface, `Bytes`. Nothing is opened before the first read, and none keeps a descriptor.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from functools import cached_property
from typing import Any, BinaryIO, Protocol

import numpy as np

from mt_core.errors import DataError
from mt_data.indexed.mapping import map_file

CHUNK_ELEMENTS = 1 << 20
CHUNK_BYTES = 8 * CHUNK_ELEMENTS


class Bytes(Protocol):
    """A file or object of a known size."""

    path: str
    size: int

    def read(self, offset: int, count: int) -> memoryview | bytes:
        """Exactly `count` bytes from `offset` on; DataError when they are not there."""
        ...


class MappedFile:
    """A file mapped into memory at the first read; reads are views of the map, not copies."""

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.size = size

    @cached_property
    def _pages(self) -> memoryview:
        try:
            pages = map_file(self.path)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise DataError(
                    f"{self.path} cannot be mapped: the system allows no more maps in one process "
                    "(vm.max_map_count); read plainly with mmap=False (data.mmap_bin_files=false), or merge shards"
                ) from error
            raise unreadable(self.path, error) from error
        if len(pages) != self.size:
            raise _changed(self.path, self.size, len(pages))
        return pages

    def read(self, offset: int, count: int) -> memoryview:
        return self._pages[offset : offset + count]


class PlainFile:
    """A file opened and read at each call: no memory is mapped, and a file that shrinks is an error."""

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.size = size

    def read(self, offset: int, count: int) -> memoryview:
        data = bytearray(count)
        view = memoryview(data)
        try:
            done = self._read_into(view, offset)
        except OSError as error:
            raise unreadable(self.path, error) from error
        if done < count:
            raise _changed(self.path, self.size, offset + done)
        return view.toreadonly()

    def _read_into(self, view: memoryview, offset: int) -> int:
        """Number of bytes read; less than asked only where the file ends. One system call gives 2 GiB at most."""
        done = 0
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            while done < len(view) and (got := os.preadv(descriptor, [view[done:]], offset + done)):
                done += got
        finally:
            os.close(descriptor)
        return done


class StoredObject:
    """An object in a store, read by ranges through fsspec."""

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.size = size

    def read(self, offset: int, count: int) -> bytes:
        if count == 0:
            return b""
        filesystem, key = object_store(self.path)
        try:
            data = filesystem.cat_file(key, start=offset, end=offset + count)
        except OSError as error:
            raise unreadable(self.path, error) from error
        if len(data) != count:
            raise _changed(self.path, self.size, offset + len(data))
        return data


class FetchedObject:
    """An object of a store that was fetched whole."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        self.size = len(data)
        self._data = memoryview(data)

    def read(self, offset: int, count: int) -> memoryview:
        return self._data[offset : offset + count]


def is_remote(location: str) -> bool:
    return "://" in location


def object_store(url: str) -> tuple[Any, str]:
    """(fsspec filesystem, key) of a URL. Raises DataError when fsspec or the store's driver is missing."""
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url)
    except ImportError as error:
        raise DataError(
            f"{url} lies in an object store, which needs fsspec and the driver of that store ({error}): "
            "pip install mt-data[object-store], and for example s3fs for s3:// or gcsfs for gs://"
        ) from error
    except ValueError as error:
        raise DataError(f"{url}: {error}; give a protocol that fsspec knows, or a path without ://") from error


def open_plain(location: str) -> Bytes:
    """A file or object for reading from end to end, without mapping it. Raises DataError when it is missing."""
    size = size_of(location)
    return StoredObject(location, size) if is_remote(location) else PlainFile(location, size)


def open_index(location: str) -> BinaryIO:
    """`.idx` as an open file; an object is fetched whole."""
    try:
        if is_remote(location):
            filesystem, key = object_store(location)
            return io.BytesIO(filesystem.cat_file(key))
        return open(location, "rb")
    except OSError as error:
        raise unreadable(location, error) from error


def size_of(location: str) -> int:
    """Bytes of a file or object; DataError when there is none."""
    try:
        if is_remote(location):
            filesystem, key = object_store(location)
            return int(filesystem.size(key))
        return os.stat(location).st_size
    except OSError as error:
        raise unreadable(location, error) from error


def read_optional(location: str) -> bytes | None:
    """The content of a small file or object, None when it does not exist."""
    try:
        if is_remote(location):
            filesystem, key = object_store(location)
            return bytes(filesystem.cat_file(key))
        with open(location, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(location, error) from error


def chunks(source: Bytes, offset: int, count: int, dtype: np.dtype) -> Iterator[np.ndarray]:
    """`count` elements of `dtype` from byte `offset` on, in arrays of CHUNK_ELEMENTS (the last has the rest)."""
    step = CHUNK_ELEMENTS
    for start in range(0, count, step):
        size = min(step, count - start)
        yield np.frombuffer(source.read(offset + start * dtype.itemsize, size * dtype.itemsize), dtype)


def unreadable(path: str, error: OSError) -> DataError:
    """What to raise for a file that the system does not give."""
    if isinstance(error, FileNotFoundError):
        return DataError(f"{path} does not exist; give the prefix of a .bin and .idx pair, without the suffix")
    return DataError(f"{path} cannot be read: {error.strerror or error}")


def _changed(path: str, size: int, now: int) -> DataError:
    fault = "shrank" if now < size else "grew"
    return DataError(
        f"{path} {fault} after it was opened, from {size} to {now} bytes; another program is writing to it, "
        "or the file system lost a part"
    )
