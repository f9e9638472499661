"""`<prefix>.manifest.json`: what a finished indexed dataset consists of, and what made it.

Megatron writes none; its files are read without. The file depends on nothing but the data, so that the same
data always has the same manifest.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from array import array
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from mt_core.errors import DataError
from mt_data.indexed.storage import Bytes

# -- checksums of `.bin` by the block: taken on writing, compared on the first read ------------------
#
# CRC-32 of 64 KiB finds what disks and copies do to a file (bits, holes of zeros, parts of other files) at the speed of
# memory. It is no signature.

BLOCK_BYTES = 1 << 16
"""A sample of 4096 ids of two bytes takes 8 KiB, so a random read costs some blocks more than it needs, once."""
CHECKSUM = np.dtype("<u4")
CURE = "copy or write the data set again. mt data verify finds all damage"


class BlockChecksums(BaseModel):
    """What a manifest records of the blocks of `.bin`; the last block may be shorter."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    algorithm: Literal["crc32"] = "crc32"
    block_bytes: PositiveInt
    checksums: str
    """uint32, little-endian, a number for each block, in base64."""

    def values(self, path: str, size: int) -> NDArray[np.uint32]:
        """uint32 [blocks]. Raises DataError when the blocks are not those of a file of `size` bytes."""
        try:
            values = np.frombuffer(base64.b64decode(self.checksums, validate=True), CHECKSUM)
        except (binascii.Error, ValueError) as error:
            raise DataError(f"{path}: the checksums of blocks are not base64 of numbers: {error}") from error
        if len(values) != -(-size // self.block_bytes):
            raise DataError(f"{path}: {len(values)} checksums of {self.block_bytes} bytes do not fit {size} bytes")
        return values


class BlockChecksummer:
    """Takes the checksums of a file's blocks while it is written, whatever the pieces."""

    def __init__(self) -> None:
        # array and not list: 4 bytes a block instead of an object each; 1 TB of .bin has 16 million blocks.
        self._done = array("I")
        self._current = self._filled = 0

    def update(self, data: memoryview) -> None:
        """The next bytes of the file."""
        start = 0
        while start < len(data):
            # Up to the end of the current block: writes of any size give the same checksums as one write of everything.
            piece = data[start : start + BLOCK_BYTES - self._filled]
            # The second argument continues a CRC, so a block may arrive in several pieces.
            self._current = zlib.crc32(piece, self._current)
            self._filled += len(piece)
            start += len(piece)
            if self._filled == BLOCK_BYTES:
                self._close()

    def _close(self) -> None:
        self._done.append(self._current)
        self._current = self._filled = 0

    def record(self) -> BlockChecksums:
        """Checksums of all that was written; nothing can be written after it."""
        if self._filled:
            self._close()
        data = np.array(self._done, CHECKSUM).tobytes()
        return BlockChecksums(block_bytes=BLOCK_BYTES, checksums=base64.b64encode(data).decode())


class CheckedBlocks:
    """A file whose blocks are compared with their checksums at their first use.

    expected: gives the recorded checksums, None when there are none; called once, at the first read. cure: what to do
    about damage.
    """

    def __init__(
        self, source: Bytes, manifest: str, expected: Callable[[], BlockChecksums | None], cure: str = CURE
    ) -> None:
        self.path, self.size, self.cure = source.path, source.size, cure
        self._source = source
        self._manifest = manifest
        self._load = expected
        self._expected: NDArray[np.uint32] | None = None
        # bool [blocks], None before the first read: the manifest is not parsed by processes that read no token.
        self._unchecked: NDArray[np.bool_] | None = None
        self._block_bytes = BLOCK_BYTES

    def view(self, offset: int, count: int) -> memoryview | bytes:
        if (blocks := self._to_check(offset, count)) is not None:
            # The blocks are read with a system call for the comparison and the caller then gets a view of the map: the
            # comparison itself cannot end in SIGBUS.
            self._checked(blocks)
        return self._source.view(offset, count)

    def read(self, offset: int, count: int) -> memoryview | bytes:
        """Read like `Bytes.read`: what is returned is what was compared. Raises DataError for a damaged block."""
        if (blocks := self._to_check(offset, count)) is None:
            return self._source.read(offset, count)
        start = offset - blocks.start * self._block_bytes
        # The compared bytes are returned instead of being read again, so nothing can change between check and use.
        return self._checked(blocks)[start : start + count]

    def _to_check(self, offset: int, count: int) -> range | None:
        """The blocks around a range of bytes, when one of them was never compared."""
        if self._unchecked is None:
            self._unchecked = self._begin()
        first, last = offset // self._block_bytes, -(-(offset + count) // self._block_bytes)
        # Without recorded checksums the array is empty, a slice of it too, and no block is ever compared.
        return range(first, last) if count and self._unchecked[first:last].any() else None

    def _begin(self) -> NDArray[np.bool_]:
        """bool [blocks]: all are to be compared; none where nothing is recorded."""
        recorded = self._load()
        if recorded is None:
            return np.zeros(0, np.bool_)
        self._block_bytes = recorded.block_bytes
        self._expected = recorded.values(self._manifest, self.size)
        return np.ones(len(self._expected), np.bool_)

    def _checked(self, blocks: range) -> memoryview:
        """The bytes of some blocks, all compared."""
        assert self._expected is not None
        assert self._unchecked is not None
        begin = blocks.start * self._block_bytes
        data = memoryview(self._source.read(begin, min(blocks.stop * self._block_bytes, self.size) - begin))
        for number, start in zip(blocks, range(0, len(data), self._block_bytes), strict=True):
            if zlib.crc32(data[start : start + self._block_bytes]) != self._expected[number]:
                raise self._damage(number)
        # Threads may compare the same block twice; the flag only ever goes from True to False, so no lock is needed.
        self._unchecked[blocks.start : blocks.stop] = False
        return data

    def _damage(self, block: int) -> DataError:
        begin = block * self._block_bytes
        return DataError(
            f"{self.path} is damaged: bytes {begin} to {min(begin + self._block_bytes, self.size) - 1} do not have the "
            f"checksum that {self._manifest} records; {self.cure}; data.verify_checksums=false reads on without "
            "comparing"
        )


def manifest_path(prefix: str) -> str:
    return prefix + ".manifest.json"


class FileRecord(BaseModel):
    """Size in bytes and SHA-256 (hexadecimal) of one file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    size: NonNegativeInt
    sha256: str


class Manifest(BaseModel):
    """Counts, checksums and origin of an indexed dataset."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal["mt-indexed-dataset"] = "mt-indexed-dataset"
    format_version: Literal[1] = 1
    sequences: NonNegativeInt
    documents: NonNegativeInt
    tokens: NonNegativeInt
    dtype: str
    multimodal: bool = False
    bin: FileRecord
    idx: FileRecord
    bin_blocks: BlockChecksums | None = None
    """Checksums of the blocks of `.bin`, compared as it is read; None in a manifest of an older release."""
    tokenizer: dict[str, Any] | None = None
    """tokenizer_type, config, fingerprint and vocab_size of the tokenizer; None when it is not known."""
    extra: dict[str, Any] = {}
    """What else the writer recorded, such as whether documents end in the end-of-document id."""

    @property
    def vocab_size(self) -> int | None:
        """The tokenizer's number of ids, None when it is not recorded."""
        value = (self.tokenizer or {}).get("vocab_size")
        return value if isinstance(value, int) else None

    def to_json(self) -> bytes:
        """The content of the file."""
        return (self.model_dump_json(indent=2) + "\n").encode()


def parse_manifest(path: str, data: bytes) -> Manifest:
    """The manifest in the bytes of a file; DataError that names the key which is wrong."""
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(
            f"{path} is not a manifest of format version 1: {where + ': ' if where else ''}"
            f"{first['msg']}. Remove it to read the data without one, or write the data again"
        ) from error


def as_json_values(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` as they will be read back; DataError when JSON cannot hold one of them."""
    try:
        return json.loads(json.dumps(dict(values), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise DataError(f"the manifest's {name} must consist of JSON values: {error}") from error
