"""The structure of a GGUF file: metadata, then a list of tensors, then their bytes."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.gguf.block_types import TYPES, BlockType
from mt_core.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""Type of a metadata value -> its code in the module struct."""
MAX_DIMENSIONS = 4
MAX_ENTRIES = 1 << 18
MAX_ELEMENTS = 1 << 22
"""Elements of all arrays: a vocabulary has three of its length (texts, scores, types), and merges."""
BLOCK_ELEMENTS = 1 << 22
"""Elements dequantized together."""


@dataclass(frozen=True)
class _Stored:
    shape: tuple[int, ...]
    type: BlockType
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.type.elements * self.type.num_bytes


class GGUFFile:
    """Metadata by key, and tensors as fp32, fp16 or bf16; quantized ones are dequantized to fp32 (a TensorFile).

    Raises CheckpointError for a file that is none, is truncated, or has element types that are not read.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            with file.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                self.metadata, self._stored = _Parser(stream, size).parse()
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
        # RecursionError: arrays within arrays. OverflowError: sizes beyond what Python can seek to.
        except (_MalformedError, struct.error, RecursionError, OverflowError) as error:
            raise CheckpointError(f"{file}: no GGUF file, or damaged: {error}") from None

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(stored.shape, stored.type.dtype) for name, stored in self._stored.items()}

    def read(self, name: str) -> Tensor:
        """One tensor on CPU, in memory of its own, dequantized some millions of elements at a time."""
        stored = self._stored[name]
        tensor = torch.empty(stored.shape, dtype=stored.type.dtype)
        flat = tensor.view(-1)
        # Whole blocks only: elements of a quantized block cannot be dequantized apart.
        step = BLOCK_ELEMENTS // stored.type.elements * stored.type.elements
        # Unbuffered: each read fills a block of some MiB anyway.
        with self.file.open("rb", buffering=0) as stream:
            stream.seek(stored.offset)
            for start in range(0, flat.numel(), step):
                target = flat[start : start + step]
                num_bytes = target.numel() // stored.type.elements * stored.type.num_bytes
                target.copy_(stored.type.to_tensor(self._read(stream, num_bytes, name)))
        return tensor

    def _read(self, stream: Any, num_bytes: int, name: str) -> np.ndarray:
        data = bytearray(num_bytes)
        target = memoryview(data)
        while target:
            count = stream.readinto(target)
            if not count:
                raise CheckpointError(f"{self.file}: truncated within tensor {name}")
            target = target[count:]
        return np.frombuffer(data, dtype=np.uint8)


class _MalformedError(Exception):
    """What the file says cannot be."""


class _Parser:
    """Reads the file's beginning; every count is checked against the file's size before memory is taken for it."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self._size, self._elements = stream, size, 0

    def parse(self) -> tuple[dict[str, Any], dict[str, _Stored]]:
        if self._take(4) != MAGIC:
            raise _MalformedError("it does not begin with GGUF")
        version = self._scalar("I")
        if version not in VERSIONS:
            raise _MalformedError(f"version {version} is none of {', '.join(map(str, VERSIONS))} (little-endian)")
        num_tensors, num_values = self._count(), self._count()
        if max(num_tensors, num_values) > MAX_ENTRIES:
            raise _MalformedError(f"{num_tensors} tensors and {num_values} values; {MAX_ENTRIES} are allowed")
        metadata = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        listed = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise _MalformedError(f"general.alignment={alignment!r}")
        # Offsets count from the first aligned byte behind the list of tensors.
        start = -(-self._stream.tell() // alignment) * alignment
        return metadata, {name: self._placed(name, shape, type_, start + at) for name, shape, type_, at in listed}

    def _tensor(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        name = self._string()
        num_dimensions = self._scalar("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise _MalformedError(f"tensor {name} has {num_dimensions} dimensions")
        sizes = [self._scalar("Q") for _ in range(num_dimensions)]
        number, offset = self._scalar("I"), self._scalar("Q")
        if number not in TYPES:
            raise CheckpointError(f"tensor {name} has the ggml type {number}; read are {_known_types()}")
        # ggml lists dimensions from the fastest to the slowest, torch the other way round.
        return name, tuple(reversed(sizes)), TYPES[number], offset

    def _placed(self, name: str, shape: tuple[int, ...], type_: BlockType, offset: int) -> _Stored:
        stored = _Stored(shape, type_, offset)
        # Blocks do not cross rows.
        if shape and shape[-1] % type_.elements:
            raise _MalformedError(f"tensor {name}: rows of {shape[-1]} elements are no whole blocks of {type_.name}")
        if offset + stored.num_bytes > self._size:
            raise _MalformedError(
                f"truncated: {self._size} bytes, but tensor {name} ends at {offset + stored.num_bytes}"
            )
        return stored

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            inner, length = self._scalar("I"), self._count()
            self._elements += length
            if self._elements > MAX_ELEMENTS:
                raise _MalformedError(f"its arrays have more than {MAX_ELEMENTS} values together")
            return [self._value(inner) for _ in range(length)]
        if kind not in SCALARS:
            raise _MalformedError(f"a value of the unknown type {kind}")
        return self._scalar(SCALARS[kind])

    def _string(self) -> str:
        # Tokens of a byte-level vocabulary need not be UTF-8.
        return self._take(self._count()).decode("utf-8", errors="surrogateescape")

    def _count(self) -> int:
        count = self._scalar("Q")
        # Whatever is counted takes at least a byte each.
        if count > self._size:
            raise _MalformedError(f"a count of {count} in a file of {self._size} bytes")
        return count

    def _scalar(self, code: str) -> Any:
        # All numbers are little-endian; big-endian files show an impossible version.
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _take(self, num_bytes: int) -> bytes:
        data = self._stream.read(num_bytes)
        if len(data) != num_bytes:
            raise _MalformedError(f"truncated at byte {self._size}")
        return data


def _known_types() -> str:
    return ", ".join(type_.name for type_ in TYPES.values())
