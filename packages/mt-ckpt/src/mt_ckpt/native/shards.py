"""Writes a stream of tensors into safetensors files, one tensor in memory at a time.

A safetensors file begins with a header that lists its tensors. To write tensors as they come, room of
fixed size is kept for the header, which is written last and padded with spaces, as the format allows.
Tensors of 1, 2, 4 and 8 bytes an element go to separate files, so that every tensor is aligned
without gaps (which the format does not allow).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash

from mt_ckpt.files.checksum import BLOCK_BYTES, checksum
from mt_ckpt.files.dtypes import ELEMENT_TYPES, format_name
from mt_ckpt.native.manifest import StoredPiece, StoredShard, StoredTensor, piece_name
from mt_core.errors import CheckpointError
from mt_core.tensor_slice import TensorSlice

HEADER_BYTES = 64 << 10
"""Room for the header of a shard: some 500 tensors."""
SYNC_BYTES = 64 << 20
"""A file is flushed in the background after so many bytes, so that the disk starts before its end."""


class ShardWriter:
    """Puts tensors, or slices of them, into `folder` as `<prefix>tensors-00001.safetensors` and so on.

    A shard is closed when the next tensor would make it larger than max_shard_bytes; a larger tensor has
    a shard for itself. After `finish` all shards are on the disk, and `shards` and `tensors` list them.
    on_disk: called with each file that is complete and synced, in another thread.
    """

    def __init__(
        self,
        folder: Path,
        max_shard_bytes: int,
        prefix: str = "",
        on_disk: Callable[[Path], None] = lambda file: None,
    ) -> None:
        self.shards: dict[str, StoredShard] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self._folder, self._prefix, self._on_disk = folder, prefix, on_disk
        self._max_shard_bytes = max_shard_bytes
        # Bytes of an element -> the shard that takes such tensors: up to four are open at a time.
        self._open: dict[int, _Shard] = {}
        self._num_shards = 0
        # One thread: a pending sync of a shard is done before the shard's descriptor is closed by `sync_and_close`.
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="mt-ckpt-sync")
        self._syncs: list[Future[None]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write one whole tensor of any shape, stride and device; it is free to change afterwards.

        Raises CheckpointError for a name given twice and for a tensor that the format cannot hold.
        """
        if name in self.tensors:
            raise CheckpointError(f"tensor {name}: given twice")
        shape = tuple(tensor.shape)
        self.add_piece(name, shape, TensorSlice.whole(shape), tensor)

    def add_piece(self, name: str, shape: tuple[int, ...], tensor_slice: TensorSlice, values: torch.Tensor) -> None:
        """Write a slice of the tensor `name`, which has the given shape as a whole."""
        dtype, data = _raw_bytes(name, values)
        shard = self._shard_for(piece_name(name, shape, tensor_slice), tensor_slice.shape, dtype, len(data))
        offset = shard.num_bytes
        digest = shard.write(data)
        piece = StoredPiece(
            shard=shard.file.name, offset=offset, start=tensor_slice.start, shape=tensor_slice.shape, checksum=digest
        )
        before = self.tensors[name].pieces if name in self.tensors else ()
        self.tensors[name] = StoredTensor(dtype=dtype, shape=shape, pieces=(*before, piece))
        # `unsynced` is changed by the caller's thread alone, so it needs no lock.
        if shard.unsynced >= SYNC_BYTES:
            shard.unsynced = 0
            self._syncs.append(self._disk.submit(shard.sync))

    def finish(self) -> None:
        """Write the headers and wait until everything is on the disk."""
        for element_bytes in list(self._open):
            self._finish_shard(element_bytes)
        # result() raises the error of a sync: a failed fsync (a full disk, a quota) is not reported anywhere else.
        for sync in self._syncs:
            sync.result()

    def close(self) -> None:
        """Close all files, finished or not."""
        # Submitted syncs still run, since they hold descriptors of shards that are no longer in `_open`.
        self._disk.shutdown(wait=True)
        for shard in self._open.values():
            shard.close()
        self._open.clear()

    def _shard_for(self, name: str, shape: tuple[int, ...], dtype: str, num_bytes: int) -> _Shard:
        element_bytes = ELEMENT_TYPES[dtype].num_bytes
        shard = self._open.get(element_bytes)
        # An empty shard takes a tensor of any size, else a tensor above the limit would fit nowhere.
        if shard and shard.data_bytes and shard.data_bytes + num_bytes > self._max_shard_bytes:
            self._finish_shard(element_bytes)
            shard = None
        # Three cases: the open shard takes it; its header is full, so that a new one is begun; not even an empty header
        # has space for it.
        if shard and shard.declare(name, dtype, shape, num_bytes):
            return shard
        if shard:
            self._finish_shard(element_bytes)
        shard = self._open[element_bytes] = self._new_shard()
        if not shard.declare(name, dtype, shape, num_bytes):
            raise CheckpointError(f"tensor {name[:80]}...: a name of {len(name)} characters is too long")
        return shard

    def _new_shard(self) -> _Shard:
        self._num_shards += 1
        return _Shard(self._folder / f"{self._prefix}tensors-{self._num_shards:05d}.safetensors")

    def _finish_shard(self, element_bytes: int) -> None:
        shard = self._open[element_bytes]
        header_checksum = shard.write_header()
        self.shards[shard.file.name] = StoredShard(
            num_bytes=shard.num_bytes, header_bytes=HEADER_BYTES, header_checksum=header_checksum
        )
        del self._open[element_bytes]
        self._syncs.append(self._disk.submit(self._finish_on_disk, shard))

    def _finish_on_disk(self, shard: _Shard) -> None:
        shard.sync_and_close()
        self._on_disk(shard.file)


class _Shard:
    """One file being written."""

    def __init__(self, file: Path) -> None:
        self.file = file
        # The next tensor's offset in the file. The header's bytes are skipped and written last by `write_header`.
        self.num_bytes = HEADER_BYTES
        self.unsynced = 0
        # Transformers 4 refuses a safetensors file whose metadata has no "format".
        self._entries = ['"__metadata__":{"format":"pt"}']
        # 8: the length of the header in front of it.
        self._header_length = 8 + len("{}") + len(self._entries[0])
        # O_EXCL: the folder is new, so an existing file is that of another writer under the same name.
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    @property
    def data_bytes(self) -> int:
        return self.num_bytes - HEADER_BYTES

    def declare(self, name: str, dtype: str, shape: tuple[int, ...], num_bytes: int) -> bool:
        """List the tensor that is written next in the header; False when the header has no room for it."""
        offsets = [self.data_bytes, self.data_bytes + num_bytes]
        entry = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        # json.dumps escapes everything beyond ASCII, so characters are bytes.
        text = f"{json.dumps(name)}:{json.dumps(entry, separators=(',', ':'))}"
        if self._header_length + len(",") + len(text) > HEADER_BYTES:
            return False
        self._header_length += len(",") + len(text)
        self._entries.append(text)
        return True

    def write(self, data: memoryview) -> str:
        """Append `data`; returns its checksum."""
        hasher = xxhash.xxh3_128()
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            hasher.update(block)
            self._write_at(block, self.num_bytes)
            self.num_bytes += len(block)
            self.unsynced += len(block)
        return hasher.hexdigest()

    def write_header(self) -> str:
        """Fill the room at the beginning; returns the checksum of those bytes."""
        text = "{" + ",".join(self._entries) + "}"
        length = HEADER_BYTES - 8
        # The spaces are part of the header's length. HEADER_BYTES is a multiple of every element size, so the data
        # behind it is aligned.
        header = length.to_bytes(8, "little") + text.encode("ascii").ljust(length)
        self._write_at(memoryview(header), 0)
        return checksum(header)

    def _write_at(self, data: memoryview, position: int) -> None:
        try:
            # pwrite may write less than given, on Linux at most 2 GiB - 4 KiB.
            while data:
                written = os.pwrite(self._descriptor, data, position)
                data, position = data[written:], position + written
        except OSError as error:
            # Errors of calls on a descriptor carry no name; the message to the user contains one.
            error.filename = str(self.file)
            raise

    def sync(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            error.filename = str(self.file)
            raise

    def sync_and_close(self) -> None:
        try:
            self.sync()
        finally:
            self.close()

    def close(self) -> None:
        os.close(self._descriptor)


def _raw_bytes(name: str, tensor: torch.Tensor) -> tuple[str, memoryview]:
    """The element type and the bytes of a tensor, row-major; on CPU and contiguous ones are not copied."""
    dtype = format_name(tensor.dtype)
    if dtype is None:
        allowed = ", ".join(element.torch_name for element in ELEMENT_TYPES.values())
        raise CheckpointError(f"tensor {name}: dtype {tensor.dtype} cannot be stored; these can: {allowed}")
    # detach: a Parameter becomes a plain Tensor, so that only true subclasses (DTensor, quantized types) are refused
    # below.
    plain = tensor.detach()
    if type(plain) is not torch.Tensor or plain.layout is not torch.strided or plain.is_meta:
        kind = f"{type(plain).__name__} ({plain.layout}, device {plain.device})"
        raise CheckpointError(f"tensor {name}: a {kind} cannot be stored; give a full dense tensor with values")
    # resolve_neg: a view with the negative bit set holds the values with the other sign in memory.
    dense = plain.resolve_neg().to("cpu").contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))  # not reshape: it may keep another stride for 0 or 1 elements
    return dtype, flat.view(torch.uint8).numpy().data
