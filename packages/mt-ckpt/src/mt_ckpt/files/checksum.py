"""Checksums of files and of parts of files.

XXH3 (128 bits) detects accidental corruption by disks, copies and truncation, at memory speed; SHA-256
would be slower than reading from one NVMe disk. It is not a signature: whoever can write the files can also
write matching checksums.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import xxhash

from mt_core.errors import CheckpointError
from mt_core.paths import is_remote

ALGORITHM = "xxh3_128"
BLOCK_BYTES = 4 << 20
"""Block size of reads and writes: large enough for the disk, small enough to be hashed while in the cache."""
REMOTE_BLOCK_BYTES = 64 << 20
"""Request size for an object store: large enough to amortize the latency of a request."""

ReadInto = Callable[[memoryview, int], int]
"""(target, offset) -> bytes that were read, at most the target's."""


def checksum(data: bytes | memoryview) -> str:
    """32 lower-case hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def read_range(file: Path, offset: int, target: memoryview) -> str:
    """Fill `target` from `file`, beginning at `offset` bytes; returns the checksum of what was read."""
    hasher = xxhash.xxh3_128()
    # One worker, so that the blocks enter the hash in their order. preadv releases the GIL, so hashing overlaps with
    # reading. A file of one block has nothing to overlap with.
    beside = ThreadPoolExecutor(1) if len(target) > BLOCK_BYTES else nullcontext()
    with _opened(file) as read_into, beside as executor:
        hashed: list[Future[None]] = []
        while target:
            block = target[: read_into(target, offset)]
            # preadv returns 0 bytes at the end of the file only.
            if not block:
                raise CheckpointError(f"{file}: truncated: it ends at byte {offset}")
            if executor is None:
                hasher.update(block)
            else:  # while the next block is read
                hashed.append(executor.submit(hasher.update, block))
            offset, target = offset + len(block), target[len(block) :]
        # `target` belongs to the caller, who may change it after the return: all blocks have to be hashed by then.
        for future in hashed:
            future.result()
    return hasher.hexdigest()


def checksum_range(file: Path, offset: int, length: int, progress: Callable[[int], None]) -> str:
    """The checksum of `length` bytes of `file`, read block by block; `progress` is called with each block's bytes."""
    hasher = xxhash.xxh3_128()
    # One buffer for all blocks: verifying takes the same memory for a shard of any size.
    buffer = memoryview(bytearray(min(length, REMOTE_BLOCK_BYTES if is_remote(file) else BLOCK_BYTES)))
    with _opened(file) as read_into:
        while length:
            block = buffer[: read_into(buffer[:length], offset)]
            if not block:
                raise CheckpointError(f"{file}: truncated: {length} bytes are missing")
            hasher.update(block)
            progress(len(block))
            offset, length = offset + len(block), length - len(block)
    return hasher.hexdigest()


def check_size(file: Path, num_bytes: int) -> None:
    """Raises CheckpointError when `file` is missing or has another size."""
    try:
        size = file.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{file}: missing or unreadable: {error.strerror or error}") from None
    if size != num_bytes:
        kind = "truncated" if size < num_bytes else "damaged"
        raise CheckpointError(f"{file}: {kind}: {size} bytes instead of {num_bytes}")


def parse_json(file: Path, data: bytes) -> dict[str, Any]:
    """The JSON object that is the content of `file`; raises CheckpointError when it is none."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return content


@contextmanager
def _opened(file: Path) -> Iterator[ReadInto]:
    if is_remote(file):
        yield _remote(file)
        return
    with file.open("rb", buffering=0) as stream:
        # Unbuffered: a BufferedReader would copy every block once more. At most BLOCK_BYTES are read at a time, so that
        # a block is hashed while it is in the cache.
        yield lambda target, offset: os.preadv(stream.fileno(), [target[:BLOCK_BYTES]], offset)


def _remote(file: Any) -> ReadInto:
    def read_into(target: memoryview, offset: int) -> int:
        end = offset + min(len(target), REMOTE_BLOCK_BYTES)
        data: bytes = file.fs.cat_file(file.path, start=offset, end=end)
        target[: len(data)] = data
        return len(data)

    return read_into
