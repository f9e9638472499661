"""Writes files as torch.save does, a tensor at a time: each is written before the next is made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mt_ckpt.pickles.archive import ArchiveWriter, ByteSink, MemberWriter
from mt_ckpt.pickles.encode import STORAGE_NAMES, Call, Storage, encode, tensor_call
from mt_ckpt.pickles.torch_file import contiguous_stride
from mt_core.errors import CheckpointError


class TorchWriter:
    """Writes one saved object at the present end of `stream`; several may follow one another in a stream.

    `add` each tensor, then `finish` with the object, which holds what `add` returned in the tensors' places. name: of
    the archive within the file.
    """

    def __init__(self, stream: ByteSink, name: str = "archive") -> None:
        self._archive, self._name, self._count = ArchiveWriter(stream), name, 0

    def add(self, tensor: Tensor) -> Call:
        """Write the elements of a dense tensor on CPU.

        Raises OSError, and CheckpointError for a dtype that has no storage of its own in torch's format.
        """
        if tensor.dtype not in STORAGE_NAMES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in STORAGE_NAMES)
            raise CheckpointError(f"a tensor of {tensor.dtype} cannot be written in this format; these can: {known}")
        shape = tuple(tensor.shape)
        storage = self._storage(tensor.dtype, tensor.numel())
        self._write(f"data/{storage.key}", _bytes_of(tensor))
        # Strides of the written elements: `_bytes_of` makes them contiguous.
        return tensor_call(storage, shape, contiguous_stride(shape))

    def begin_flat(self, dtype: torch.dtype, numel: int) -> FlatWriter:
        """A tensor of one dimension that comes in pieces. Nothing else may be added before its end."""
        storage = self._storage(dtype, numel)
        member = self._archive.begin(f"{self._name}/data/{storage.key}", numel * dtype.itemsize)
        return FlatWriter(member, storage, numel)

    def _storage(self, dtype: torch.dtype, numel: int) -> Storage:
        self._count += 1
        return Storage(str(self._count - 1), dtype, numel)

    def finish(self, value: Any) -> None:
        """Write the object and the end of the archive; the stream stays open."""
        # Behind the storages, since the object has to name them; torch's reader finds members by the directory.
        self._write("data.pkl", memoryview(encode(value)))
        self._write("byteorder", memoryview(b"little"))
        # The version of the archive, without which torch does not take it for a file of torch.save.
        self._write("version", memoryview(b"3\n"))
        self._archive.finish()

    def _write(self, member: str, data: memoryview) -> None:
        self._archive.add(f"{self._name}/{member}", data)


class FlatWriter:
    """A flat tensor, while its pieces come."""

    def __init__(self, member: MemberWriter, storage: Storage, numel: int) -> None:
        self._member, self._storage, self._numel = member, storage, numel

    def write(self, piece: Tensor) -> None:
        """All elements of a dense tensor on CPU of the flat one's dtype. Raises OSError."""
        self._member.write(_bytes_of(piece))

    def finish(self) -> Call:
        self._member.finish()
        return tensor_call(self._storage, (self._numel,), (1,))


def _bytes_of(tensor: Tensor) -> memoryview:
    dense = tensor.detach().contiguous()
    # as_strided in place of reshape, which keeps a stride of 0 for one element; view(uint8) needs stride 1.
    flat = dense.as_strided((dense.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def write_object(stream: ByteSink, value: Any) -> None:
    """Write one object without tensors."""
    TorchWriter(stream).finish(value)
