"""Writes zip archives without compression to the end of a stream, every member's data aligned.

The format is PKWARE's APPNOTE 6.3.10, with its zip64 fields where a size or offset needs them. Unlike zipfile this
never seeks, so that several archives can follow one another in a file, and one that is given up needs no closing.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, replace
from typing import Any, Protocol

ALIGNMENT = 64
"""Alignment of a member's first byte, counted from the archive's, so that a file of its own can be mapped."""
BLOCK_BYTES = 8 << 20
# 4.5, the first version of the format with zip64.
_VERSION = 45
_DATE = 33
"""1980-01-01, the first that the format has."""
_LIMIT_32 = 0xFFFFFFFF
_LIMIT_16 = 0xFFFF
_LOCAL_HEADER_BYTES = 30
_ZIP64, _PADDING = 0x0001, 0x4246  # the second spells FB, which torch writes too
_DESCRIBED = 1 << 3
"""Flag of a member whose checksum stands behind its data."""


@dataclass(frozen=True)
class _Member:
    name: bytes
    crc: int
    num_bytes: int
    offset: int
    flags: int = 0


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
        # In blocks: a sink that hashes or counts works on data that is still in the cache.
        for begin in range(0, len(data), BLOCK_BYTES):
            self._write(data[begin : begin + BLOCK_BYTES])
        self._members.append(member)

    def begin(self, name: str, num_bytes: int) -> MemberWriter:
        """A member that is written in pieces, `num_bytes` in all. No other may be begun before its end."""
        # The CRC is not known before the data, and the stream does not seek back: it is written in a descriptor behind
        # the data, and in the directory.
        member = _Member(name.encode(), 0, num_bytes, self._position, _DESCRIBED)
        self._write(_local_header(member))
        return MemberWriter(self, member)

    def finish(self) -> None:
        begin = self._position
        for member in self._members:
            self._write(_directory_entry(member))
        self._write(_end(len(self._members), begin, self._position - begin))

    def _write(self, data: bytes | memoryview) -> None:
        self._stream.write(data)
        self._position += len(data)


class MemberWriter:
    """A member of an archive, while its pieces come."""

    def __init__(self, archive: ArchiveWriter, member: _Member) -> None:
        self._archive, self._member = archive, member
        self._crc, self._left = 0, member.num_bytes

    def write(self, data: memoryview) -> None:
        """Raises OSError."""
        self._crc = zlib.crc32(data, self._crc)
        self._left -= len(data)
        for begin in range(0, len(data), BLOCK_BYTES):
            self._archive._write(data[begin : begin + BLOCK_BYTES])

    def finish(self) -> None:
        assert self._left == 0, f"{self._member.name!r}: {self._left} bytes are missing"
        member = replace(self._member, crc=self._crc)
        self._archive._write(_descriptor(member))
        self._archive._members.append(member)


def _descriptor(member: _Member) -> bytes:
    # The sizes of a descriptor have 8 bytes exactly if the local header has a zip64 field.
    kind = "Q" if member.num_bytes >= _LIMIT_32 else "I"
    return struct.pack(f"<4sI{kind}{kind}", b"PK\x07\x08", member.crc, member.num_bytes, member.num_bytes)


def _local_header(member: _Member) -> bytes:
    large = member.num_bytes >= _LIMIT_32
    extra = struct.pack("<HHQQ", _ZIP64, 16, member.num_bytes, member.num_bytes) if large else b""
    # 4: the header of the padding field itself, two bytes of id and two of length.
    unpadded = member.offset + _LOCAL_HEADER_BYTES + len(member.name) + len(extra) + 4
    filler = -unpadded % ALIGNMENT
    extra += struct.pack("<HH", _PADDING, filler) + b"Z" * filler
    # All ones in a 32-bit field: the value is in the zip64 field.
    size = _LIMIT_32 if large else member.num_bytes
    # Signature, version needed, flags, method 0 (stored), time, date, CRC-32, compressed and plain size, lengths of
    # name and extra fields. Little-endian, 30 bytes.
    fields = (b"PK\x03\x04", _VERSION, member.flags, 0, 0, _DATE, member.crc, size, size, len(member.name), len(extra))
    return struct.pack("<4sHHHHHIIIHH", *fields) + member.name + extra


def _directory_entry(member: _Member) -> bytes:
    sizes = [member.num_bytes] * 2 if member.num_bytes >= _LIMIT_32 else []
    offsets = [member.offset] if member.offset >= _LIMIT_32 else []
    # Only the values that do not fit are in the directory's zip64 field, in this order.
    wide = sizes + offsets
    extra = struct.pack(f"<HH{len(wide)}Q", _ZIP64, 8 * len(wide), *wide) if wide else b""
    size = _LIMIT_32 if sizes else member.num_bytes
    head = (
        b"PK\x01\x02",
        _VERSION,
        _VERSION,
        member.flags,
        0,
        0,
        _DATE,
        member.crc,
        size,
        size,
        len(member.name),
        len(extra),
    )
    # Comment length, disk, internal and external attributes, offset of the local header.
    tail = (0, 0, 0, 0, _LIMIT_32 if offsets else member.offset)
    return struct.pack("<4sHHHHHHIIIHHHHHII", *head, *tail) + member.name + extra


def _end(count: int, offset: int, num_bytes: int) -> bytes:
    # A value equal to the largest of its field means "see zip64" too, hence >=.
    wide = count >= _LIMIT_16 or offset >= _LIMIT_32 or num_bytes >= _LIMIT_32
    record = b""
    if wide:
        numbers = (0, 0, count, count, num_bytes, offset)
        # Zip64 end of the directory: 44 bytes follow the size field; versions made by and needed, two disk numbers,
        # entries on this disk and in all, size and offset of the directory.
        record = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, _VERSION, _VERSION, *numbers)
        # Zip64 locator: disk of the record above, its offset, number of disks.
        record += struct.pack("<4sIQI", b"PK\x06\x07", 0, offset + num_bytes, 1)
    short = (min(count, _LIMIT_16), min(count, _LIMIT_16), min(num_bytes, _LIMIT_32), min(offset, _LIMIT_32))
    return record + struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, *short, 0)
