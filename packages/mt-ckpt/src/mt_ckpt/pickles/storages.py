"""Where the storages of a file of torch.save lie, in both of its layouts.

Since torch 1.6 a file is a zip archive without compression: `<name>/data.pkl` and a member `<name>/data/<key>` for each
storage. Before, it was a row of pickles (a magic number, a version, facts of the system, the object, the keys of
the storages) followed by the storages, each after its length.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mt_ckpt.pickles.archive import BLOCK_BYTES
from mt_ckpt.pickles.unpickler import SafeUnpickler, StorageReference
from mt_core.errors import CheckpointError

LOCAL_HEADER_BYTES = 30
MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001


@dataclass(frozen=True)
class Extent:
    """Bytes of a file. crc: their CRC-32, None where the file has none."""

    offset: int
    num_bytes: int
    crc: int | None = None


@dataclass(frozen=True)
class Contents:
    """The unpickled object of a file, and where its storages are, by key."""

    value: Any
    storages: Mapping[str, Extent]


class Window(io.RawIOBase):
    """The bytes [offset, offset + num_bytes) of an open file, as a file; it closes the file."""

    def __init__(self, stream: BinaryIO, offset: int, num_bytes: int) -> None:
        self.offset = offset
        self._stream, self._size, self._position = stream, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, target: Any) -> int:
        room = memoryview(target)[: max(0, self._size - self._position)]
        count = os.preadv(self._stream.fileno(), [room], self.offset + self._position) if room else 0
        self._position += count
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


def read_contents(file: Path, extent: Extent | None = None) -> Contents:
    """What torch.save wrote into `file`, or into a part of it. Tensors are references; no storage is read.

    Raises CheckpointError when it cannot be read, is damaged, or refers to what is not allowed.
    """
    try:
        # The window counts from the beginning of the part, so that an archive within a DCP data file reads as a file.
        with _open(file, extent) as window:
            if _is_archive(window):
                pickled, storages = _read_archive(file, window)
                return Contents(SafeUnpickler(io.BytesIO(pickled), str(file)).load(), storages)
            return _read_row_of_pickles(file, window)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error


def pickled_text(file: Path, num_bytes: int) -> bytes:
    """The first bytes of the object that torch.save wrote, not unpickled. Raises CheckpointError and OSError."""
    with _open(file, None) as window:
        return _read_archive(file, window)[0][:num_bytes] if _is_archive(window) else window.read(num_bytes)


def _open(file: Path, extent: Extent | None) -> _Reader:
    stream = file.open("rb", buffering=0)
    extent = extent or Extent(0, os.fstat(stream.fileno()).st_size)
    return _Reader(Window(stream, extent.offset, extent.num_bytes))


class _Reader(io.BufferedReader):
    """A buffered window. start: its offset in the file."""

    def __init__(self, window: Window) -> None:
        super().__init__(window)
        self.start = window.offset


def _is_archive(window: _Reader) -> bool:
    # peek does not move the position. The signature is that of a local file header: the older layout begins with a
    # pickle.
    return window.peek(4)[:4] == b"PK\x03\x04"


def _read_archive(file: Path, window: _Reader) -> tuple[bytes, dict[str, Extent]]:
    """The pickle, and the storages by key."""
    try:
        with zipfile.ZipFile(window) as archive:
            # The first folder is the archive's name, which torch takes from the file's.
            members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        extents = {name: _extent(file, window, info) for name, info in members.items()}
        pickled = _read_member(file, extents["data.pkl"])
        # Older archives have no such member; torch.load takes them for little-endian, too.
        order = _read_member(file, extents["byteorder"]) if "byteorder" in extents else b"little"
    except (zipfile.BadZipFile, KeyError, EOFError, ValueError, struct.error, NotImplementedError) as error:
        raise CheckpointError(f"{file}: damaged, truncated, or no file of torch.save: {error}") from None
    if order != b"little":
        raise CheckpointError(f"{file}: written on a machine of byte order {order!r}, not little")
    storages = {name.removeprefix("data/"): extent for name, extent in extents.items() if name.startswith("data/")}
    return pickled, storages


def _extent(file: Path, window: _Reader, info: zipfile.ZipInfo) -> Extent:
    """Where the bytes of a member are: behind its own header, whose length only that header holds."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{file}: {info.filename} is compressed; torch.save does not compress")
    window.seek(info.header_offset)
    header = window.read(LOCAL_HEADER_BYTES)
    # The local header's extra field has torch's alignment padding; the directory's entry has not, so that its length is
    # another.
    name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
    offset = window.start + info.header_offset + LOCAL_HEADER_BYTES + name_bytes + extra_bytes
    return Extent(offset, info.file_size, info.CRC or None)  # torch writes 0 where it computed none


def _read_member(file: Path, extent: Extent) -> bytes:
    # The size comes from the file: no buffer of it is allocated before it is compared with the file.
    if extent.offset + extent.num_bytes > file.stat().st_size:
        raise CheckpointError(f"{file}: truncated or damaged: it lists {extent.num_bytes} bytes at {extent.offset}")
    data = bytearray(extent.num_bytes)
    read_range(file, extent.offset, memoryview(data), extent.crc)
    return bytes(data)


def _read_row_of_pickles(file: Path, window: _Reader) -> Contents:
    # The layout before torch 1.6 stores lengths in elements; their size is known from the references in the pickle.
    element_bytes: dict[str, int] = {}

    class Row(SafeUnpickler):
        def persistent_load(self, reference: Any) -> StorageReference:
            storage = super().persistent_load(reference)
            element_bytes[storage.key] = 1 if storage.dtype is None else storage.dtype.itemsize
            return storage

    def load() -> Any:
        return Row(window, str(file)).load()

    if load() != MAGIC_NUMBER or load() != PROTOCOL_VERSION:
        raise CheckpointError(f"{file}: no file of torch.save")
    system = load()
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise CheckpointError(f"{file}: written on a machine of another byte order than little endian")
    # The order of the keys is that of the storages behind them.
    value, keys = load(), load()
    if not isinstance(keys, list):
        raise CheckpointError(f"{file}: damaged: it has no list of its storages")
    storages = {}
    for key in map(str, keys):
        length = window.read(8)
        if len(length) < 8 or key not in element_bytes:
            raise CheckpointError(f"{file}: truncated or damaged: storage {key} has no bytes")
        # Extents are checked against the file when they are read, in `read_range`.
        num_bytes = int.from_bytes(length, "little", signed=True) * element_bytes[key]
        storages[key] = Extent(window.start + window.tell(), num_bytes)
        window.seek(num_bytes, os.SEEK_CUR)
    return Contents(value, storages)


def require_intact(file: Path, extent: Extent) -> None:
    """Raises CheckpointError unless the bytes of `extent` have its CRC-32, if it has one. Reads block by block."""
    if extent.crc is None:
        return
    block = memoryview(bytearray(min(BLOCK_BYTES, extent.num_bytes)))
    actual = 0
    for begin in range(0, extent.num_bytes, BLOCK_BYTES):
        part = block[: extent.num_bytes - begin]
        read_range(file, extent.offset + begin, part, None)
        actual = zlib.crc32(part, actual)
    _require_crc(file, extent.offset, extent.num_bytes, actual, extent.crc)


def read_range(file: Path, offset: int, target: memoryview, crc: int | None) -> None:
    """Fill `target` with the bytes at `offset`. crc: their CRC-32, None: unknown.

    Raises CheckpointError when the file cannot be read, ends before, or the checksum is another.
    """
    actual, position, rest = 0, offset, target
    try:
        with file.open("rb", buffering=0) as stream:
            while rest:
                count = os.preadv(stream.fileno(), [rest[:BLOCK_BYTES]], position)
                if not count:
                    raise CheckpointError(f"{file}: truncated: it ends at byte {position}, within a tensor")
                if crc is not None:
                    # CRC-32 is computed block by block, while the bytes are in the cache.
                    actual = zlib.crc32(rest[:count], actual)
                rest, position = rest[count:], position + count
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    if crc is not None:
        _require_crc(file, offset, len(target), actual, crc)


def _require_crc(file: Path, offset: int, num_bytes: int, actual: int, expected: int) -> None:
    if actual != expected:
        raise CheckpointError(f"{file}: damaged: the checksum of the {num_bytes} bytes at {offset} does not match")
