"""Writes zip archives without compression to the end of a stream, each member at once, every one's data aligned.

The format is PKWARE's APPNOTE 6.3.10, with its zip64 fields where a size or offset needs them. Unlike zipfile this
never seeks, so that several archives can follow one another in a file, and one that is given up needs no closing.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any, Protocol

ALIGNMENT = 64
"""Of a member's first byte, counted from the archive's, so that a file of its own can be mapped."""
BLOCK_BYTES = 8 << 20
_VERSION = 45
_DATE = 33
"""1980-01-01, the first that the format has."""
_LIMIT_32 = 0xFFFFFFFF
_LIMIT_16 = 0xFFFF
_LOCAL_HEADER_BYTES = 30
_ZIP64, _PADDING = 0x0001, 0x4246  # the second spells FB, which torch writes too


@dataclass(frozen=True)
class _Member:
    name: bytes
    crc: int
    num_bytes: int
    offset: int


class ByteSink(Protocol):
    """What can be written to: an open file, or anything that counts or hashes on the way."""

    def write(self, data: Any, /) -> Any: ...


class ArchiveWriter:
    """Begins at the present end of `stream`, which stays open; `finish` writes the directory of what was added."""

    def __init__(self, stream: ByteSink) -> None:
        self._stream, self._position = stream, 0
        self._members: list[_Member] = []

    def add(self, name: str, data: memoryview) -> None:
        """Write a member. Raises OSError."""
        member = _Member(name.encode(), zlib.crc32(data), len(data), self._position)
        self._write(_local_header(member))
        for begin in range(0, len(data), BLOCK_BYTES):
            self._write(data[begin : begin + BLOCK_BYTES])
        self._members.append(member)

    def finish(self) -> None:
        begin = self._position
        for member in self._members:
            self._write(_directory_entry(member))
        self._write(_end(len(self._members), begin, self._position - begin))

    def _write(self, data: bytes | memoryview) -> None:
        self._stream.write(data)
        self._position += len(data)


def _local_header(member: _Member) -> bytes:
    large = member.num_bytes >= _LIMIT_32
    extra = struct.pack("<HHQQ", _ZIP64, 16, member.num_bytes, member.num_bytes) if large else b""
    unpadded = member.offset + _LOCAL_HEADER_BYTES + len(member.name) + len(extra) + 4
    filler = -unpadded % ALIGNMENT
    extra += struct.pack("<HH", _PADDING, filler) + b"Z" * filler
    size = _LIMIT_32 if large else member.num_bytes
    fields = (b"PK\x03\x04", _VERSION, 0, 0, 0, _DATE, member.crc, size, size, len(member.name), len(extra))
    return struct.pack("<4sHHHHHIIIHH", *fields) + member.name + extra


def _directory_entry(member: _Member) -> bytes:
    sizes = [member.num_bytes] * 2 if member.num_bytes >= _LIMIT_32 else []
    offsets = [member.offset] if member.offset >= _LIMIT_32 else []
    wide = sizes + offsets
    extra = struct.pack(f"<HH{len(wide)}Q", _ZIP64, 8 * len(wide), *wide) if wide else b""
    size = _LIMIT_32 if sizes else member.num_bytes
    head = (b"PK\x01\x02", _VERSION, _VERSION, 0, 0, 0, _DATE, member.crc, size, size, len(member.name), len(extra))
    tail = (0, 0, 0, 0, _LIMIT_32 if offsets else member.offset)
    return struct.pack("<4sHHHHHHIIIHHHHHII", *head, *tail) + member.name + extra


def _end(count: int, offset: int, num_bytes: int) -> bytes:
    wide = count >= _LIMIT_16 or offset >= _LIMIT_32 or num_bytes >= _LIMIT_32
    record = b""
    if wide:
        numbers = (0, 0, count, count, num_bytes, offset)
        record = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, _VERSION, _VERSION, *numbers)
        record += struct.pack("<4sIQI", b"PK\x06\x07", 0, offset + num_bytes, 1)
    short = (min(count, _LIMIT_16), min(count, _LIMIT_16), min(num_bytes, _LIMIT_32), min(offset, _LIMIT_32))
    return record + struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, *short, 0)
