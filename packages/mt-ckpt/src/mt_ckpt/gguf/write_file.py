"""Encodes the structure of a GGUF file (version 3): metadata, the list of tensors, and where their bytes are."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from mt_ckpt.gguf.block_types import BlockType
from mt_ckpt.gguf.file import ARRAY, DEFAULT_ALIGNMENT, MAGIC, STRING

VERSION = 3
UINT32, INT32, FLOAT32, BOOL, UINT64 = 4, 5, 6, 7, 10


def encode_header(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[Sequence[int], BlockType]]) -> bytes:
    """The file up to the first byte of the first tensor. tensors: in the order of their bytes, each from the next
    aligned byte on; shapes in torch's order."""
    head = MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata))
    head += b"".join(_text(key) + _typed(value) for key, value in metadata.items())
    offset = 0
    for name, (shape, type_) in tensors.items():
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += _text(name) + sizes + struct.pack("<IQ", type_.number, offset)
        offset = aligned(offset + num_bytes(shape, type_))
    return head.ljust(aligned(len(head)), b"\0")


def num_bytes(shape: Sequence[int], type_: BlockType) -> int:
    elements = 1
    for size in shape:
        elements *= size
    return type_.size(elements)


def aligned(offset: int) -> int:
    return -(-offset // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _text(value: str) -> bytes:
    data = value.encode("utf-8", errors="surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _typed(value: Any) -> bytes:
    if isinstance(value, list | tuple):
        kind = _kind(value[0]) if value else STRING
        # Lists of integers are signed in llama.cpp.
        kind = INT32 if kind == UINT32 else kind
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(_raw(entry, kind) for entry in value)
    kind = _kind(value)
    return struct.pack("<I", kind) + _raw(value, kind)


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return INT32 if value < 0 else (UINT32 if value < 1 << 32 else UINT64)
    return FLOAT32 if isinstance(value, float) else STRING


def _raw(value: Any, kind: int) -> bytes:
    if kind == STRING:
        return _text(value)
    return struct.pack({BOOL: "<?", UINT32: "<I", INT32: "<i", UINT64: "<Q", FLOAT32: "<f"}[kind], value)
