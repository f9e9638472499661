"""Files of torch.save, opened without executing anything in them; tensors are read one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.pickles.storages import Contents, Extent, read_contents, read_range, require_intact
from mt_ckpt.pickles.unpickler import TensorReference
from mt_core.errors import CheckpointError


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
    found: dict[str, StoredTensor] = {}
    for key, entry in value.items():
        if isinstance(entry, StoredTensor):
            found[f"{prefix}{key}"] = entry
        elif isinstance(entry, dict):
            found.update(tensors_in(entry, f"{prefix}{key}."))
    return found


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    stride = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        # max(..., 1): torch's strides of an empty tensor are those of a tensor of size 1 there.
        stride[dim] = stride[dim + 1] * max(shape[dim + 1], 1)
    return tuple(stride)
