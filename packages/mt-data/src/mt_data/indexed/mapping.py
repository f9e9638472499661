"""Read-only memory maps that hold no file descriptor, so that thousands of shards can be mapped at once.

`mmap.mmap` keeps a duplicate of the descriptor unless that is turned off (`trackfd`, Python 3.13). Below that
version the map is made with the C library directly.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from functools import cache


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
