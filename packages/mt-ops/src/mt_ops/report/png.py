"""PNG files of a few colours, written without a library."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SIGNATURE = b"\x89PNG\r\n\x1a\n"
PALETTE = 3
"""Colour type of a PNG whose pixels are numbers of colours (PNG, third edition, 11.2.1)."""


def indexed_png(pixels: NDArray[np.uint8], colours: Sequence[str]) -> bytes:
    """pixels: [height, width], numbers of colours. colours: as "fde725"."""
    height, width = pixels.shape
    # Each row begins with its filter: 0, none.
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, PALETTE, 0, 0, 0)
    palette = b"".join(map(bytes.fromhex, colours))
    chunks = [(b"IHDR", header), (b"PLTE", palette), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")]
    return SIGNATURE + b"".join(_chunk(name, content) for name, content in chunks)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
