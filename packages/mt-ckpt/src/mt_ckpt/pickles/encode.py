"""Writes pickles of plain values, of tensors kept beside them, and of references to named classes.

Only what checkpoints need can be written; it is pickle protocol 2, which torch.save uses. Unlike pickle.dumps it needs
none of the classes that it names.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

STORAGE_NAMES: Mapping[torch.dtype, str] = {
    torch.float32: "FloatStorage",
    torch.float64: "DoubleStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
}


@dataclass(frozen=True)
class Global:
    """A class or function by its name."""

    module: str
    name: str


@dataclass(frozen=True)
class Call:
    """What a function makes of arguments."""

    function: Global
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Object:
    """A new object of a class; state: its attributes, or what its __setstate__ takes."""

    kind: Global
    state: Any
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Storage:
    """A storage beside the pickle."""

    key: str
    dtype: torch.dtype
    num_elements: int


@dataclass(frozen=True)
class OrderedItems:
    """An OrderedDict."""

    items: Mapping[Any, Any] = field(default_factory=dict)


NAMESPACE = Global("argparse", "Namespace")


def namespace(attributes: Mapping[str, Any]) -> Object:
    """An argparse.Namespace."""
    return Object(NAMESPACE, dict(attributes))


def tensor_call(storage: Storage, shape: tuple[int, ...], stride: tuple[int, ...]) -> Call:
    """A tensor that begins at the storage's first element."""
    # _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, backward_hooks): the hooks are an empty
    # OrderedDict.
    hooks = Call(Global("collections", "OrderedDict"), ())
    return Call(Global("torch._utils", "_rebuild_tensor_v2"), (storage, 0, shape, stride, False, hooks))


def encode(value: Any) -> bytes:
    """The pickle of `value`. Raises TypeError for a type that is not written."""
    # PROTO 2. No memo is written: an object that occurs twice is written twice.
    parts: list[bytes] = [b"\x80\x02"]
    _write(value, parts)
    parts.append(b".")
    return b"".join(parts)


def _write(value: Any, parts: list[bytes]) -> None:
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        parts.append(_scalar(value))
    elif isinstance(value, Mapping):
        parts.append(b"}")
        _write_items(value, parts)
    elif isinstance(value, OrderedItems):
        _write(Call(Global("collections", "OrderedDict"), ()), parts)
        _write_items(value.items, parts)
    elif isinstance(value, list):
        # EMPTY_LIST, MARK, entries, APPENDS.
        parts.append(b"](")
        for entry in value:
            _write(entry, parts)
        parts.append(b"e")
    elif isinstance(value, tuple):
        parts.append(b"(")
        for entry in value:
            _write(entry, parts)
        parts.append(b"t")
    else:
        _write_reference(value, parts)


def _write_reference(value: Any, parts: list[bytes]) -> None:
    if isinstance(value, Global):
        parts.append(f"c{value.module}\n{value.name}\n".encode())
    elif isinstance(value, Call):
        _write(value.function, parts)
        _write(value.arguments, parts)
        # REDUCE: calls the function below the arguments on the stack.
        parts.append(b"R")
    elif isinstance(value, Object):
        _write(value.kind, parts)
        _write(value.arguments, parts)
        # NEWOBJ: class.__new__(class, *arguments), without __init__.
        parts.append(b"\x81")
        if value.state is not None:
            _write(value.state, parts)
            # BUILD: __setstate__(state), or an update of __dict__.
            parts.append(b"b")
    elif isinstance(value, Storage):
        kind = Global("torch", STORAGE_NAMES[value.dtype])
        # BINPERSID: the tuple that torch's persistent_load takes.
        _write(("storage", kind, value.key, "cpu", value.num_elements), parts)
        parts.append(b"Q")
    else:
        raise TypeError(f"a {type(value).__name__} is not written into checkpoints: {value!r}")


def _write_items(items: Mapping[Any, Any], parts: list[bytes]) -> None:
    parts.append(b"(")
    for key, entry in items.items():
        _write(key, parts)
        _write(entry, parts)
    # SETITEMS, of all pairs since the MARK.
    parts.append(b"u")


def _scalar(value: Any) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, float):
        # BINFLOAT is big-endian; all other numbers of the protocol are little-endian.
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(text)) + text
    return f"ctorch\n{str(value).removeprefix('torch.')}\n".encode()


def _integer(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    # LONG1 needs a bit for the sign: bit_length() // 8 + 1 bytes always have one.
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data
