"""Writes pickles of plain values, of tensors kept beside them, and of references to named classes.

Only what checkpoints need can be written; it is pickle protocol 2, which torch.save uses. Unlike pickle.dumps it needs
none of the classes that it names.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
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
    encoder = _Encoder()
    encoder.write(value)
    return b"".join([b"\x80\x02", *encoder.parts, b"."])  # PROTO 2, STOP


class _Encoder:
    """parts: the pickle so far. Of what occurs twice only references are written once: an index of a large checkpoint
    names the same few classes for each of its chunks, and whoever loads it would look up each of them again."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._memo: dict[Global, bytes] = {}

    def write(self, value: Any) -> None:
        # By the type itself first: a class that is looked for with isinstance takes ten times as long.
        writer = _WRITERS.get(type(value))
        if writer is None:
            writer = next((write for kind, write in _WRITERS.items() if isinstance(value, kind)), _refuse)
        writer(self, value)

    def mapping(self, value: Mapping[Any, Any]) -> None:
        self.parts.append(b"}")
        self._items(value)

    def ordered_items(self, value: OrderedItems) -> None:
        self.call(Call(Global("collections", "OrderedDict"), ()))
        self._items(value.items)

    def _items(self, items: Mapping[Any, Any]) -> None:
        self.parts.append(b"(")
        for key, entry in items.items():
            self.write(key)
            self.write(entry)
        # SETITEMS, of all pairs since the MARK.
        self.parts.append(b"u")

    def sequence(self, value: Iterable[Any]) -> None:
        self._entries(b"](", value, b"e")  # EMPTY_LIST, MARK, entries, APPENDS

    def arguments(self, value: Iterable[Any]) -> None:
        self._entries(b"(", value, b"t")

    def _entries(self, begin: bytes, entries: Iterable[Any], end: bytes) -> None:
        self.parts.append(begin)
        for entry in entries:
            self.write(entry)
        self.parts.append(end)

    def reference(self, value: Global) -> None:
        if (known := self._memo.get(value)) is not None:
            self.parts.append(known)
            return
        self.parts.append(f"c{value.module}\n{value.name}\n".encode())
        # BINPUT and BINGET have one byte for the number.
        if (number := len(self._memo)) < 256:
            self.parts.append(b"q" + bytes([number]))
            self._memo[value] = b"h" + bytes([number])

    def dtype(self, value: torch.dtype) -> None:
        self.reference(Global("torch", str(value).removeprefix("torch.")))

    def call(self, value: Call) -> None:
        self.reference(value.function)
        self.arguments(value.arguments)
        # REDUCE: calls the function below the arguments on the stack.
        self.parts.append(b"R")

    def new_object(self, value: Object) -> None:
        self.reference(value.kind)
        self.arguments(value.arguments)
        # NEWOBJ: class.__new__(class, *arguments), without __init__.
        self.parts.append(b"\x81")
        if value.state is not None:
            self.write(value.state)
            # BUILD: __setstate__(state), or an update of __dict__.
            self.parts.append(b"b")

    def storage(self, value: Storage) -> None:
        # BINPERSID: the tuple that torch's persistent_load takes.
        kind = Global("torch", STORAGE_NAMES[value.dtype])
        self.arguments(("storage", kind, value.key, "cpu", value.num_elements))
        self.parts.append(b"Q")

    def none(self, value: None) -> None:
        self.parts.append(b"N")

    def boolean(self, value: bool) -> None:
        self.parts.append(b"\x88" if value else b"\x89")

    def integer(self, value: int) -> None:
        if -(2**31) <= value < 2**31:
            self.parts.append(b"J" + struct.pack("<i", value))
            return
        # LONG1 needs a bit for the sign: bit_length() // 8 + 1 bytes always have one.
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        self.parts.append(b"\x8a" + bytes([len(data)]) + data)

    def real(self, value: float) -> None:
        # BINFLOAT is big-endian; all other numbers of the protocol are little-endian.
        self.parts.append(b"G" + struct.pack(">d", value))

    def string(self, value: str) -> None:
        text = value.encode("utf-8", "surrogatepass")
        self.parts.append(b"X" + struct.pack("<I", len(text)) + text)


_WRITERS: Mapping[type, Callable[[_Encoder, Any], None]] = {
    str: _Encoder.string,
    bool: _Encoder.boolean,  # before int, of which it is a subclass
    int: _Encoder.integer,
    float: _Encoder.real,
    type(None): _Encoder.none,
    torch.dtype: _Encoder.dtype,
    dict: _Encoder.mapping,
    Mapping: _Encoder.mapping,
    list: _Encoder.sequence,
    tuple: _Encoder.arguments,
    OrderedItems: _Encoder.ordered_items,
    Global: _Encoder.reference,
    Call: _Encoder.call,
    Object: _Encoder.new_object,
    Storage: _Encoder.storage,
}


def _refuse(encoder: _Encoder, value: Any) -> None:
    raise TypeError(f"a {type(value).__name__} is not written into checkpoints: {value!r}")
