"""Where the bytes of an indexed dataset lie: mapped files, files read plainly, objects in a store.

The three have one interface, `Bytes`. Nothing is opened before the first read.
"""

from __future__ import annotations

import ctypes
import errno
import io
import mmap
import os
import resource
import sys
import weakref
from collections.abc import Iterator
from functools import cache, cached_property
from typing import Any, BinaryIO, Protocol

import numpy as np

from mt_core.errors import DataError

# Scans take arrays of this many elements: 8 MiB of the widest dtype (int64, float64).
CHUNK_ELEMENTS = 1 << 20
CHUNK_BYTES = 8 * CHUNK_ELEMENTS
SHARE_OF_DESCRIPTORS = 4
"""Token files stay open while the process uses less than this part (1/4) of the descriptors it may have."""


class Bytes(Protocol):
    """A file or object of a known size."""

    path: str
    size: int

    def view(self, offset: int, count: int) -> memoryview | bytes:
        """`count` bytes from `offset` on, without a copy where there can be one; DataError when they are not there."""
        ...

    def read(self, offset: int, count: int) -> memoryview | bytes:
        """The same in memory that no file backs, so that what happens to the file later does not matter."""
        ...


class MappedFile:
    """A file mapped into memory at the first view; what is read is copied by the system instead.

    Touching a part of a map that the file has lost ends the process (SIGBUS), and no check can be made at that
    moment. So a view is given only while the file has its size; a read, which the system answers, is safe always.
    """

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.size = size
        self._file = PlainFile(path, size)

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
        # The file was replaced between the check of its size and the map.
        if len(pages) != self.size:
            raise _changed(self.path, self.size, len(pages))
        return pages

    def view(self, offset: int, count: int) -> memoryview:
        pages = self._pages
        self._check_size()
        return pages[offset : offset + count]

    def read(self, offset: int, count: int) -> memoryview | bytes:
        return self._file.read(offset, count)

    def _check_size(self) -> None:
        try:
            # A system call per view, by name: the map keeps no descriptor (see mapping.py) on which fstat could be
            # called.
            now = os.stat(self.path).st_size
        except FileNotFoundError:  # the map outlives the name
            return
        except OSError as error:
            raise unreadable(self.path, error) from error
        if now != self.size:
            raise _changed(self.path, self.size, now)


class PlainFile:
    """A file read by the system at each call: no memory is mapped, and a file that shrinks is an error.

    It stays open from the first read on where the process has descriptors to spare, since opening is slow on
    network file systems; where it has few left, each read opens the file anew.
    """

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.size = size
        self._kept: _Descriptor | None = None

    def view(self, offset: int, count: int) -> memoryview | bytes:
        return self.read(offset, count)

    def read(self, offset: int, count: int) -> memoryview | bytes:
        try:
            # The local name keeps the descriptor open although another thread may replace it.
            # No lock: two threads may both open, one descriptor is then kept and the other closed by its __del__.
            descriptor = self._kept or self._open()
            data: bytes | memoryview = os.pread(descriptor.number, count, offset)
            # pread returns less than requested at the end of the file and above 2^31 - 4096 bytes (Linux).
            if len(data) < count:
                data = _read_rest(descriptor.number, data, offset, count)
        except OSError as error:
            raise unreadable(self.path, error) from error
        if len(data) < count:
            raise _changed(self.path, self.size, offset + len(data))
        return data

    def _open(self) -> _Descriptor:
        descriptor = _Descriptor(self.path)
        # Compared with the size that was checked against .idx: a file renamed into place since then is another one.
        if (now := os.fstat(descriptor.number).st_size) != self.size:
            raise _changed(self.path, self.size, now)
        # The system gives the lowest free number, which so says how many are in use.
        if descriptor.number < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // SHARE_OF_DESCRIPTORS:
            self._kept = descriptor
        return descriptor


class _Descriptor:
    """An open file, closed when nobody refers to it any more."""

    def __init__(self, path: str) -> None:
        # Set before open, so that __del__ finds the attribute when open raises.
        self.number = -1
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


def _read_rest(descriptor: int, begin: bytes | memoryview, offset: int, count: int) -> memoryview:
    """`begin` and what follows it, `count` bytes unless the file ends. One system call gives 2 GiB at most."""
    # One buffer of the full size, filled in place; joining pieces would hold the data twice.
    data = bytearray(count)
    view = memoryview(data)
    done = len(begin)
    view[:done] = begin
    while done < count and (got := os.preadv(descriptor, [view[done:]], offset + done)):
        done += got
    return view[:done].toreadonly()


class StoredObject:
    """An object in a store, read by ranges through fsspec."""

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.size = size

    def view(self, offset: int, count: int) -> bytes:
        return self.read(offset, count)

    def read(self, offset: int, count: int) -> bytes:
        if count == 0:
            return b""
        # Not kept on the instance: fsspec caches filesystem instances, and a data set stays cheap to pickle.
        filesystem, key = object_store(self.path)
        try:
            data = filesystem.cat_file(key, start=offset, end=offset + count)
        except OSError as error:
            raise unreadable(self.path, error) from error
        # A range request that passes the end returns the part that exists (RFC 9110, 14.1.2).
        if len(data) != count:
            raise _changed(self.path, self.size, offset + len(data))
        return data


class FetchedObject:
    """A file or object that was read whole."""

    def __init__(self, path: str, data: bytes | memoryview) -> None:
        self.path = path
        self.size = len(data)
        self._data = memoryview(data)

    def view(self, offset: int, count: int) -> memoryview:
        return self._data[offset : offset + count]

    def read(self, offset: int, count: int) -> memoryview:
        return self.view(offset, count)


def is_remote(location: str) -> bool:
    return "://" in location


def object_store(url: str) -> tuple[Any, str]:
    """(fsspec filesystem, key) of a URL. Raises DataError when fsspec or the store's driver is missing."""
    try:
        # Imported on use: local files need neither fsspec nor the driver of a store.
        from fsspec.core import url_to_fs

        return url_to_fs(url)
    except ImportError as error:
        raise DataError(
            f"{url} lies in an object store, which needs fsspec and the driver of that store ({error}): "
            "pip install mt-data[object-store], and for example s3fs for s3:// or gcsfs for gs://"
        ) from error
    except ValueError as error:
        raise DataError(f"{url}: {error}; give a protocol of fsspec, or a path without ://") from error


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
        # `read`, not `view`: a scan of a mapped file must raise on truncation, not end in SIGBUS.
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


# -- memory maps without a file descriptor, so that thousands of shards can be mapped at once --------
#
# `mmap.mmap` keeps a duplicate of the descriptor unless that is turned off (`trackfd`, Python 3.13). Below that
# version the map is made with the C library directly.


def map_file(path: str) -> memoryview:
    """The bytes of a file [size], mapped and read-only; pages are read as they are touched.

    The map lives as long as the view or any array over it. A file must not shrink while it is mapped:
    touching what is gone ends the process with SIGBUS.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        # mmap refuses a length of 0.
        if size == 0:
            return memoryview(b"")
        if sys.version_info >= (3, 13):
            return memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ, trackfd=False))
        return _map_descriptor(descriptor, size)
    finally:
        os.close(descriptor)


def _map_descriptor(descriptor: int, size: int) -> memoryview:
    library = _c_library()
    # MAP_SHARED: all processes that map the file use the same pages. The map stays after the descriptor is closed.
    address = library.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    # MAP_FAILED is (void *) -1, not a null pointer.
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    pages = (ctypes.c_ubyte * size).from_address(address)
    # At exit other threads may still read; the system unmaps for us then.
    # `pages` is the object that memoryviews and NumPy arrays over it keep alive; the map ends with the last of them.
    weakref.finalize(pages, library.munmap, address, size).atexit = False
    return memoryview(pages).cast("B").toreadonly()


@cache
def _c_library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    # Declared types: by default ctypes passes and returns 32-bit int, which cuts addresses and sizes. The last argument
    # is off_t, 64 bits on 64-bit Linux and macOS.
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library
