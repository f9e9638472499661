"""Checksums of files and of parts of files.

XXH3 (128 bits) finds every accident that a disk, a copy or a truncation makes, at memory speed; SHA-256
would be slower than reading from one NVMe disk. It is no signature: who can write the files can also
write fitting checksums.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import xxhash

from mt_core.errors import CheckpointError

ALGORITHM = "xxh3_128"
BLOCK_BYTES = 4 << 20
"""Read or written at once: large enough for the disk, small enough to be hashed while in the cache."""


def checksum(data: bytes | memoryview) -> str:
    """32 lower-case hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def read_range(file: Path, offset: int, target: memoryview) -> str:
    """Fill `target` from `file`, beginning at `offset` bytes; returns the checksum of what was read."""
    hasher = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as stream:
        while target:
            block = target[: os.preadv(stream.fileno(), [target[:BLOCK_BYTES]], offset)]
            if not block:
                raise CheckpointError(f"{file}: truncated: it ends at byte {offset}")
            hasher.update(block)
            offset, target = offset + len(block), target[len(block) :]
    return hasher.hexdigest()


def checksum_range(file: Path, offset: int, length: int, progress: Callable[[int], None]) -> str:
    """The checksum of `length` bytes of `file`, read block by block; `progress` is told of each block's bytes."""
    hasher = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as stream:
        stream.seek(offset)
        while length:
            block = stream.read(min(length, BLOCK_BYTES))
            if not block:
                raise CheckpointError(f"{file}: truncated: {length} bytes are missing")
            hasher.update(block)
            progress(len(block))
            length -= len(block)
    return hasher.hexdigest()
