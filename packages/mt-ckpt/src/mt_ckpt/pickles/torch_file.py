"""Files of torch.save, opened without executing anything in them; tensors are read and written one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.pickles.archive import ArchiveWriter, ByteSink, MemberWriter
from mt_ckpt.pickles.encode import STORAGE_NAMES, Call, Storage, encode, tensor_call
from mt_ckpt.pickles.storages import Contents, Extent, read_contents, read_range, require_intact
from mt_ckpt.pickles.unpickler import TensorReference
from mt_core.errors import CheckpointError
from mt_core.paths import is_remote


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. `offset` and `stride` count elements of its storage, whose bytes are `extent`.

    checked: storages of the file whose checksum has been compared, shared by its tensors.
    """

    file: Path
    extent: Extent
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    checked: set[Extent] = field(default_factory=set, compare=False, repr=False)

    def read(self) -> Tensor:
        """The tensor on CPU, in memory of its own. Raises CheckpointError when the file is damaged or truncated."""
        if math.prod(self.shape) == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        # Index of the last element, relative to the first: of a view only the elements between the two are read.
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        elements = self._read_elements(self.offset, last + 1)
        # contiguous copies a transposed or expanded view; for others the memory is that just read.
        return elements.as_strided(self.shape, self.stride).contiguous()

    def read_flat(self, first: int, count: int) -> Tensor:
        """Elements [first, first + count) of a contiguous tensor, in row-major order."""
        if not self.is_contiguous:
            return self.read().flatten()[first : first + count].clone()
        return self._read_elements(self.offset + first, count)

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            # A dimension of size 1 may have any stride.
            if size != 1 and step != expected:
                return False
            expected *= size
        return True

    def _read_elements(self, first: int, count: int) -> Tensor:
        size = self.dtype.itemsize
        # Checked before the buffer is allocated: shape and stride come from the file.
        if (first + count) * size > self.extent.num_bytes:
            raise CheckpointError(f"{self.file}: damaged: a tensor reaches beyond the bytes of its storage")
        elements = torch.empty(count, dtype=self.dtype)
        target = elements.view(torch.uint8).numpy().data
        # The archive's CRC is of the whole storage, which is read once more before the first of its parts.
        whole = count * size == self.extent.num_bytes
        if not whole and self.extent not in self.checked:
            require_intact(self.file, self.extent)
            self.checked.add(self.extent)
        offset = self.extent.offset + first * size
        read_range(self.file, offset, target, self.extent.crc if whole else None)
        return elements


@dataclass(frozen=True)
class TorchFile:
    """value: the object that was saved, with StoredTensor in the place of tensors and `Inert` in that of others."""

    file: Path
    value: Any
    storages: Mapping[str, Extent] = field(repr=False)


def open_torch_file(file: Path, extent: Extent | None = None) -> TorchFile:
    """The object in `file`, or in a part of it. Raises CheckpointError as `read_contents` does."""
    contents = read_contents(file, extent)
    return TorchFile(file, _replace(contents.value, _locator(file, contents)), contents.storages)


def _locator(file: Path, contents: Contents) -> Callable[[TensorReference], StoredTensor]:
    checked: set[Extent] = set()

    def locate(reference: TensorReference) -> StoredTensor:
        extent = contents.storages.get(reference.storage.key)
        if extent is None:
            raise CheckpointError(f"{file}: damaged: it has no storage {reference.storage.key}")
        return StoredTensor(file, extent, reference.dtype, reference.offset, reference.shape, reference.stride, checked)

    return locate


def _replace(value: Any, locate: Callable[[TensorReference], StoredTensor]) -> Any:
    """`value` with every reference within its dictionaries, lists and tuples replaced."""
    # Recursion is safe: check_structure has limited the depth.
    if isinstance(value, TensorReference):
        return locate(value)
    if isinstance(value, dict):
        return {key: _replace(entry, locate) for key, entry in value.items()}
    if isinstance(value, list):
        return [_replace(entry, locate) for entry in value]
    if isinstance(value, tuple):
        return tuple(_replace(entry, locate) for entry in value)
    return value


def tensors_in(value: Any, prefix: str = "") -> dict[str, StoredTensor]:
    """Every tensor in nested dictionaries, by the keys on the way to it with dots between."""
    tensors: dict[str, StoredTensor] = {}
    for key, entry in value.items():
        if isinstance(entry, StoredTensor):
            tensors[f"{prefix}{key}"] = entry
        elif isinstance(entry, dict):
            tensors.update(tensors_in(entry, f"{prefix}{key}."))
    return tensors


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    stride = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        # max(..., 1): torch's strides of an empty tensor are those of a tensor of size 1 there.
        stride[dim] = stride[dim + 1] * max(shape[dim + 1], 1)
    return tuple(stride)


# -- writing: each tensor is written before the next is made -------------------------------------------


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


# -- files that hold named tensors and nothing else, as `pytorch_model.bin` does ------------------------


class NamedTensorsFile:
    """A file whose content is a dictionary of tensors, which are read one at a time; nothing in it is executed.

    Raises CheckpointError for a file that is damaged, names code, or holds anything else.
    """

    def __init__(self, file: Path) -> None:
        if is_remote(file):
            raise CheckpointError(f"{file}: files of torch.save are read from disks only; copy the checkpoint to one")
        self._stored = _only_tensors(file, open_torch_file(file).value)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(stored.shape, stored.dtype) for name, stored in self._stored.items()}

    def same_storage(self, first: str, second: str) -> bool:
        """Whether two tensors are both there and are the same elements of one storage."""
        # Both tensors are equal StoredTensor values: the same bytes of the same file, shape and stride.
        return first in self._stored and self._stored[first] == self._stored.get(second)

    def read(self, name: str) -> Tensor:
        """One tensor on CPU, contiguous, in memory of its own."""
        return self._stored[name].read()


def _only_tensors(file: Path, content: Any) -> dict[str, StoredTensor]:
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{file}: holds a {type(content).__name__}, expected named tensors")
    for name, value in content.items():
        if not isinstance(value, StoredTensor):
            kind = type(value).__name__
            raise CheckpointError(f"{file}: {name} is a {kind}, expected named tensors and nothing else")
    return dict(content)
