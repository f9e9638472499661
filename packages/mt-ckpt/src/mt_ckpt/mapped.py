"""Parts of files as memory, without a copy: pages of the file that the process sees."""

from __future__ import annotations

import mmap
from pathlib import Path

MADV_POPULATE_READ = 22
"""Linux 5.14 and later: bring all pages in now, and report what cannot be read as an error."""


def map_range(file: Path, offset: int, length: int) -> memoryview | None:
    """`length` bytes of `file` from `offset`; None where that cannot be had, and reading may or may not succeed.

    The memory may be written to; the file does not change. It is given back with the last reference to it. All
    pages are there on return: were they brought in at first use, an error of the disk would end the process by a
    signal instead of a message.
    """
    # The offset of a mapping has to be a multiple of the page size.
    before = offset % mmap.ALLOCATIONGRANULARITY
    try:
        with file.open("rb") as stream:
            # ACCESS_COPY is MAP_PRIVATE: a write to the tensor changes a copy of the page. The mapping stays after
            # `stream` closes.
            mapped = mmap.mmap(stream.fileno(), before + length, access=mmap.ACCESS_COPY, offset=offset - before)
        mapped.madvise(mmap.MADV_WILLNEED)
        # Before Linux 5.14 this is EINVAL, and the caller reads into memory instead.
        mapped.madvise(MADV_POPULATE_READ)
    except (OSError, ValueError):  # ValueError: the file is shorter
        return None
    return memoryview(mapped)[before:]
