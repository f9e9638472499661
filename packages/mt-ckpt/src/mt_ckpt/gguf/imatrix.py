"""Importance matrices of llama.cpp: for each matrix the mean of the squared inputs of each column, read from GGUF files
and from the older binary format, written as GGUF."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mt_ckpt.gguf.block_types import BY_NAME
from mt_ckpt.gguf.file import MAGIC, GGUFFile
from mt_ckpt.gguf.write_file import aligned, encode_header
from mt_core.errors import CheckpointError

Importance = Mapping[str, np.ndarray]
"""Tensor -> float32 [experts or 1, columns]."""
SUMS, COUNTS = ".in_sum2", ".counts"
MAX_ENTRIES, MAX_NAME = 1 << 18, 1 << 10


@dataclass
class Sums:
    """squares: float64 [experts or 1, columns], summed over `counts` [experts or 1] inputs."""

    squares: np.ndarray
    counts: np.ndarray

    def mean(self) -> np.ndarray:
        """1 for what no input reached, as in llama.cpp."""
        counts = self.counts[:, None]
        return np.where(counts > 0, self.squares / np.maximum(counts, 1), 1.0).astype(np.float32)


def read_imatrix(file: Path) -> dict[str, np.ndarray]:
    """Raises CheckpointError for a file that is damaged or none."""
    try:
        with file.open("rb") as stream:
            is_gguf = stream.read(4) == MAGIC
            if not is_gguf:
                stream.seek(0)
                importance = _read_legacy(stream, file)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    if is_gguf:
        importance = _read_gguf(GGUFFile(file))
    for name, values in importance.items():
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise CheckpointError(f"{file}: the importance of {name} has negative or infinite values")
    return importance


def _read_gguf(file: GGUFFile) -> dict[str, np.ndarray]:
    names = [name.removesuffix(SUMS) for name in file.tensors if name.endswith(SUMS)]
    if not names or any(name + COUNTS not in file.tensors for name in names):
        raise CheckpointError(f"{file.file}: no importance matrix: tensors NAME{SUMS} and NAME{COUNTS} are missing")
    importance = {}
    for name in names:
        squares, counts = file.read(name + SUMS).numpy(), file.read(name + COUNTS).numpy().reshape(-1)
        squares = squares.reshape(-1, squares.shape[-1])
        if len(squares) != len(counts):
            raise CheckpointError(
                f"{file.file}: {name} has sums of {len(squares)} and counts of {len(counts)} matrices"
            )
        importance[name] = Sums(squares, counts).mean()
    return importance


def _read_legacy(stream: BinaryIO, file: Path) -> dict[str, np.ndarray]:
    """Entries of name, number of calls, and values that are multiplied by it; the shape is that of the tensor."""
    size = file.stat().st_size

    def number(limit: int) -> int:
        data = stream.read(4)
        value = struct.unpack("<i", data)[0] if len(data) == 4 else -1
        if not 0 <= value <= limit:
            raise CheckpointError(f"{file}: no importance matrix, or damaged at byte {stream.tell()}")
        return int(value)

    importance = {}
    for _ in range(number(MAX_ENTRIES)):
        name = stream.read(number(MAX_NAME)).decode("utf-8", errors="replace")
        calls, count = number(1 << 30), number(size // 4)
        data = stream.read(4 * count)
        if len(data) != 4 * count or not calls or not count:
            raise CheckpointError(f"{file}: no importance matrix, or damaged at {name!r}")
        importance[name] = (np.frombuffer(data, "<f4") / np.float32(calls))[None]
    return importance


def write_imatrix(file: Path, sums: Mapping[str, Sums], datasets: Sequence[str], chunks: int, chunk_size: int) -> None:
    """In the format that llama.cpp writes; chunks: pieces of text, of chunk_size tokens each."""
    metadata = {
        "general.type": "imatrix",
        "imatrix.datasets": list(datasets),
        "imatrix.chunk_count": chunks,
        "imatrix.chunk_size": chunk_size,
    }
    tensors = {}
    for name, entry in sums.items():
        tensors[name + SUMS] = entry.squares.astype("<f4")
        tensors[name + COUNTS] = entry.counts.reshape(-1, 1).astype("<f4")
    header = encode_header(metadata, {name: (values.shape, BY_NAME["F32"]) for name, values in tensors.items()})
    with file.open("wb") as stream:
        stream.write(header)
        for values in tensors.values():
            data = values.tobytes()
            stream.write(data.ljust(aligned(len(data)), b"\0"))
