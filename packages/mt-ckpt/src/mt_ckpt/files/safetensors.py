"""Safetensors files, read and written a tensor at a time.

The format (https://github.com/huggingface/safetensors): eight bytes with the length of the header, the
header (JSON: name -> dtype, shape, byte range after the header), then the tensors without gaps. Of a file only the
tensor that is read is in memory, whatever the file's size.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

from mt_ckpt.files.checksum import BLOCK_BYTES, checksum, read_range
from mt_ckpt.files.dtypes import ELEMENT_TYPES, format_name
from mt_core.errors import CheckpointError
from mt_core.paths import is_remote

# -- mapped parts of files ---------------------------------------------------------------------------

MADV_POPULATE_READ = 22
"""Linux 5.14 and later: bring all pages in now, and report what cannot be read as an error."""


def map_range(file: Path, offset: int, length: int) -> memoryview | None:
    """`length` bytes of `file` from `offset`; None where that cannot be had, and reading may or may not succeed.

    The memory may be written to; the file does not change. It is given back with the last reference to it. All
    pages are there on return: were they brought in at first use, an error of the disk would end the process by a
    signal instead of a message.
    """
    # The offset of a mapping has to be a multiple of the page size.
    before = offset % mmap.ALLOCATIONGRANULARITY
    try:
        with file.open("rb") as stream:
            # ACCESS_COPY is MAP_PRIVATE: a write to the tensor changes a copy of the page. The mapping stays after
            # `stream` closes.
            mapped = mmap.mmap(stream.fileno(), before + length, access=mmap.ACCESS_COPY, offset=offset - before)
        mapped.madvise(mmap.MADV_WILLNEED)
        # Before Linux 5.14 this is EINVAL, and the caller reads into memory instead.
        mapped.madvise(MADV_POPULATE_READ)
    except (OSError, ValueError):  # ValueError: the file is shorter
        return None
    return memoryview(mapped)[before:]


METADATA = "__metadata__"
MAX_HEADER_BYTES = 100 << 20
"""The limit that the safetensors library sets."""
MAX_TENSORS = 1 << 18
"""Entries of one file: a hundred thousand are the experts of the largest models, in all their files."""
MAX_DIMENSIONS, MAX_SIZE = 64, 1 << 62
"""Dimensions of a shape, as torch has them."""
ALIGNMENT = 8
PENDING_BYTES = 64 << 20
SYNC_BYTES = 64 << 20
"""After so many bytes a file is flushed in the background, so that the disk does not wait for its end."""
Part = tuple[int, str]
"""Bytes that follow one another in a file: their number and XXH3 checksum."""


@dataclass(frozen=True)
class TensorInfo:
    """What a file says of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Place:
    info: TensorInfo
    offset: int


class RequireWritten(Protocol):
    """Raises CheckpointError unless bytes that were read from an offset of a file are those that were written there."""

    def __call__(self, file: Path, offset: int, data: memoryview) -> None: ...


class SafetensorsFile:
    """An existing file. Raises CheckpointError when its header is not one, or contradicts its size.

    require: called with the header, and with each tensor that is read, before it is used.
    """

    def __init__(self, file: Path, require: RequireWritten = lambda file, offset, data: None) -> None:
        self.file, self._require = file, require
        try:
            self._places, self.metadata = _read_header(file, require)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: place.info for name, place in self._places.items()}

    def read(self, name: str) -> Tensor:
        """One tensor on CPU, contiguous, which may be changed. Its memory is the file's where the system can do that,
        so the file must not be cut or written to while the tensor is in use."""
        place = self._places[name]
        tensor = self._values(name, place)
        self._require(self.file, place.offset, _bytes_of(tensor))
        return tensor

    def _values(self, name: str, place: _Place) -> Tensor:
        # Mapped pages need a local file.
        if is_remote(self.file):
            return self._fetched(place)
        tensor = _mapped(self.file, place)
        return self._copied(name, place) if tensor is None else tensor

    def _fetched(self, place: _Place) -> Tensor:
        tensor = torch.empty(place.info.shape, dtype=place.info.dtype)
        try:
            read_range(self.file, place.offset, _bytes_of(tensor))
        except OSError as error:
            raise CheckpointError(f"{self.file}: cannot be read: {error.strerror or error}") from error
        return tensor

    def _copied(self, name: str, place: _Place) -> Tensor:
        tensor = torch.empty(place.info.shape, dtype=place.info.dtype)
        target, offset = _bytes_of(tensor), place.offset
        with self.file.open("rb", buffering=0) as stream:
            while target:
                # preadv returns 0 at the end of the file only.
                count = os.preadv(stream.fileno(), [target[:BLOCK_BYTES]], offset)
                if not count:
                    raise CheckpointError(f"{self.file}: truncated: it ends at byte {offset}, within tensor {name}")
                target, offset = target[count:], offset + count
        return tensor


class SafetensorsWriter:
    """A new file that holds `tensors`, whose values are added in that order. Close it in any case.

    A thread writes and computes checksums while the caller makes the next values ready, another one has the disk begin
    before the end. An element must not be larger than the one before, so that every tensor is aligned: see `align`.
    """

    def __init__(
        self,
        file: Path,
        tensors: Mapping[str, TensorInfo],
        pending_bytes: int = PENDING_BYTES,
        *,
        offset: int | None = None,
    ) -> None:
        """pending_bytes: of values that may wait to be written. offset: where the tensors begin in a file that
        `begin_safetensors` has made; None: a new file.

        Raises OSError, and CheckpointError for a dtype that the format cannot hold.
        """
        self._file, self._pending_bytes = file, pending_bytes
        # Taken by `add` one by one; what is left when `finish` is called has no values.
        self._left = iter(tensors.items())
        header = _header(tensors) if offset is None else b""
        self._stream = file.open("wb" if offset is None else "r+b", buffering=0)
        # Several processes write parts of one file, each with a stream and a position of its own: see
        # `convert.workers`.
        self._stream.seek(offset or 0)
        # One thread, since writes follow one another at the stream's position. File I/O releases the GIL.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mt-ckpt-write")
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="mt-ckpt-sync")
        self._unsynced = 0
        self._syncs: list[Future[None]] = []
        self._parts: list[Future[Part]] = []
        # (write, bytes) of values that may not be on the disk yet. Their memory is held until the write is done.
        self._waiting: deque[tuple[Future[Part], int]] = deque()
        if header:
            self._submit(memoryview(header))

    def add(self, value: Tensor) -> None:
        """Take the next tensor, which must not change any more.

        Raises OSError, and ValueError when it is not the one that is due.
        """
        name, info = next(self._left)
        if tuple(value.shape) != info.shape or value.dtype != info.dtype:
            raise ValueError(f"{name}: got {value.dtype} {list(value.shape)}, planned {info}")
        self._submit(_bytes_of(value.contiguous()))
        # Back-pressure: a source that is faster than the disk would otherwise fill the memory with pending values.
        while sum(size for _, size in self._waiting) > self._pending_bytes:
            self._waiting.popleft()[0].result()

    def finish(self) -> list[Part]:
        """Sync the file, whose values must all be there; returns its parts: the header of a new file, each tensor."""
        if missing := [name for name, _ in self._left]:
            raise ValueError(f"{self._file}: no value was added for {', '.join(missing[:8])}")
        # result() raises the error of a write before the file is taken for complete.
        parts = [part.result() for part in self._parts]
        for sync in self._syncs:
            sync.result()
        self._sync()
        return parts

    def close(self) -> None:
        # After an error pending writes are dropped: the file is not kept. Both threads end before the stream is closed.
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._disk.shutdown(wait=True, cancel_futures=True)
        self._stream.close()

    def _submit(self, data: memoryview) -> None:
        part = self._thread.submit(self._write, data)
        self._parts.append(part)
        self._waiting.append((part, len(data)))

    def _write(self, data: memoryview) -> Part:
        hasher = xxhash.xxh3_128()
        try:
            for start in range(0, len(data), BLOCK_BYTES):
                block = data[start : start + BLOCK_BYTES]
                hasher.update(block)
                self._write_block(block)
        except OSError as error:
            error.filename = str(self._file)
            raise
        return len(data), hasher.hexdigest()

    def _write_block(self, block: memoryview) -> None:
        self._unsynced += len(block)
        while block:
            # An unbuffered write may take a part of the block only.
            block = block[self._stream.write(block) :]
        if self._unsynced >= SYNC_BYTES:
            self._unsynced = 0
            self._syncs.append(self._disk.submit(self._sync))

    def _sync(self) -> None:
        try:
            os.fsync(self._stream.fileno())
        except OSError as error:
            error.filename = str(self._file)
            raise


def write_safetensors(file: Path, tensors: Mapping[str, TensorInfo], values: Iterable[Tensor]) -> list[Part]:
    """Write and sync a whole file; `values` come in the order of `tensors`. Returns its parts as `finish` does."""
    with closing(SafetensorsWriter(file, tensors)) as writer:
        for value in values:
            writer.add(value)
            del value  # else it is held while the next one is made
        return writer.finish()


def begin_safetensors(file: Path, tensors: Mapping[str, TensorInfo]) -> Part:
    """A new file with its header and room for the tensors, which `write_tensors` writes; returns the header as a part.

    Raises OSError, and CheckpointError for a dtype that the format cannot hold.
    """
    header = _header(tensors)
    with file.open("wb") as stream:
        stream.write(header)
        # The file has its final size at once (sparse), so that writers of later parts need not wait for earlier ones.
        stream.truncate(len(header) + sum(info.num_bytes for info in tensors.values()))
    return len(header), checksum(header)


def write_tensors(file: Path, tensors: Mapping[str, TensorInfo], values: Iterable[Tensor], offset: int) -> list[Part]:
    """Write and sync tensors that follow one another, from `offset` bytes on. Returns a part for each."""
    with closing(SafetensorsWriter(file, tensors, offset=offset)) as writer:
        for value in values:
            writer.add(value)
            del value  # else it is held while the next one is made
        return writer.finish()


def align(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors with larger elements first, as write_safetensors expects them; otherwise in the given order."""
    # sorted is stable, also with a negated key.
    return dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))


# -- the header -------------------------------------------------------------------------------------


def _header(tensors: Mapping[str, TensorInfo]) -> bytes:
    entries: dict[str, Any] = {METADATA: {"format": "pt"}}
    position, largest = 0, None
    for name, info in tensors.items():
        if largest is not None and info.dtype.itemsize > largest:
            # With decreasing element sizes every offset is a multiple of its element's size, without gaps, which the
            # format does not allow.
            raise ValueError(f"{name}: elements larger than those before; order the tensors with align()")
        largest = info.dtype.itemsize
        entries[name] = {"dtype": _format_name(name, info.dtype), "shape": list(info.shape)}
        entries[name]["data_offsets"] = [position, position + info.num_bytes]
        position += info.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Spaces after the JSON are part of the header. The safetensors library pads so too.
    text = text.ljust(math.ceil(len(text) / ALIGNMENT) * ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _format_name(name: str, dtype: torch.dtype) -> str:
    dtype_name = format_name(dtype)
    if dtype_name is None:
        raise CheckpointError(f"tensor {name}: dtype {dtype} cannot be stored in a safetensors file")
    return dtype_name


def _read_header(file: Path, require: RequireWritten) -> tuple[dict[str, _Place], Mapping[str, str]]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        # The length is untrusted: it is limited before so many bytes are read.
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(f"{file}: no safetensors file, or truncated: {size} bytes, header of {length}")
        text = stream.read(length)
    require(file, 0, memoryview(length.to_bytes(8, "little") + text))
    try:
        # Before it is parsed: an entry of forty bytes becomes a kilobyte of objects.
        if text.count(b"{") > MAX_TENSORS + 2 or text.count(b"[") > 2 * MAX_TENSORS:
            raise ValueError(f"it lists more than {MAX_TENSORS} tensors, the largest number in a file")
        header = json.loads(text)
        metadata = dict(header.pop(METADATA, None) or {})
        places = {name: _place(entry, 8 + length) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{file}: the header of this safetensors file is damaged: {error}") from None
    _require_no_gaps(file, places, 8 + length, size)
    return places, metadata


def _place(entry: Mapping[str, Any], start: int) -> _Place:
    # Before their product is made, which has as many digits as they have together.
    if len(entry["shape"]) > MAX_DIMENSIONS or any(int(size) > MAX_SIZE for size in entry["shape"]):
        raise ValueError(f"a shape has more than {MAX_DIMENSIONS} dimensions, or one above {MAX_SIZE}")
    info = TensorInfo(tuple(int(size) for size in entry["shape"]), ELEMENT_TYPES[entry["dtype"]].torch_dtype())
    begin, end = entry["data_offsets"]
    # Offsets are compared with shape x element size here, and with the neighbours and the file's size in
    # `_require_no_gaps`.
    if min(info.shape, default=0) < 0 or end - begin != info.num_bytes:
        raise ValueError(f"{entry} does not fit its bytes")
    return _Place(info, start + begin)


def _require_no_gaps(file: Path, places: Mapping[str, _Place], position: int, size: int) -> None:
    # Sorted by size as well: an empty tensor begins where the next one does, and has to come before it.
    for name, place in sorted(places.items(), key=lambda item: (item[1].offset, item[1].info.num_bytes)):
        if place.offset != position:
            raise CheckpointError(f"{file}: damaged: tensor {name} does not begin where the one before it ends")
        position += place.info.num_bytes
    if position != size:
        kind = "truncated" if size < position else "damaged"
        raise CheckpointError(f"{file}: {kind}: {size} bytes, but its tensors end at {position}")


# -- bytes ------------------------------------------------------------------------------------------


def _mapped(file: Path, place: _Place) -> Tensor | None:
    """The tensor in the file's own pages; None where they cannot be had or its elements are not aligned."""
    info = place.info
    # mmap takes no empty range. torch.frombuffer needs alignment, which files of other writers may lack.
    if not info.num_bytes or place.offset % info.dtype.itemsize:
        return None
    memory = map_range(file, place.offset, info.num_bytes)
    # The tensor keeps `memory`, and that the mapping, alive.
    return None if memory is None else torch.frombuffer(memory, dtype=info.dtype).view(info.shape)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # not reshape: it may keep a stride of 0 or 1 elements
    return flat.view(torch.uint8).numpy().data


def split_by_size(tensors: Mapping[str, TensorInfo], max_bytes: int) -> Sequence[dict[str, TensorInfo]]:
    """Groups of at most `max_bytes` in the given order; a larger tensor is a group by itself."""
    groups: list[dict[str, TensorInfo]] = [{}]
    room = max_bytes
    for name, info in tensors.items():
        # `groups[-1]`: the first tensor of a group fits whatever its size.
        if groups[-1] and info.num_bytes > room:
            groups.append({})
            room = max_bytes
        groups[-1][name] = info
        room -= info.num_bytes
    return groups
