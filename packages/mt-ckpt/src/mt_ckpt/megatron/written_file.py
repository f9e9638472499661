"""A new file, whose checksum is computed while it is written."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import xxhash


class WrittenFile(io.RawIOBase):
    """Written from beginning to end; the folders above it are made. `sync` when it is whole, `close` in any case."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # Buffered: the archive writer makes many small writes, of headers and directory entries.
        self._stream = path.open("wb")
        self._hasher, self._size = xxhash.xxh3_128(), 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        # Hashed as it is written, so that the file is not read again.
        self._hasher.update(data)
        self._size += len(data)
        return self._stream.write(data)

    def sync(self) -> list[tuple[int, str]]:
        """Wait until all is on the disk; returns what `ResumableFolder.finish` takes. Raises OSError."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return [(self._size, self._hasher.hexdigest())]

    def close(self) -> None:
        self._stream.close()
        super().close()
