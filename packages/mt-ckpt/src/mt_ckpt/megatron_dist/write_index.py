"""Writes the index of a PyTorch distributed checkpoint (DCP), as `mt_ckpt.megatron_dist.index` reads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from mt_ckpt.pickles.encode import Call, Global, Object, encode

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
CONTIGUOUS = 0
"""The enum value of torch.contiguous_format."""


@dataclass(frozen=True)
class WrittenTensor:
    """A whole tensor, of which chunks are written."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class WrittenBlob:
    """What one torch.save wrote: a chunk of the tensor `key`, or with offsets None the object `key`."""

    key: str
    offsets: tuple[int, ...] | None
    sizes: tuple[int, ...]
    file: str
    offset: int
    num_bytes: int


def encode_index(tensors: Mapping[str, WrittenTensor], blobs: Iterable[WrittenBlob]) -> bytes:
    """The content of `.metadata`."""
    listed = list(blobs)
    chunks: dict[str, list[Object]] = {key: [] for key in tensors}
    for blob in listed:
        if blob.offsets is not None:
            place = {"offsets": _size(blob.offsets), "sizes": _size(blob.sizes)}
            chunks[blob.key].append(Object(Global(METADATA, "ChunkStorageMetadata"), place))
    state = {key: _tensor(tensor, chunks[key]) for key, tensor in tensors.items()}
    state |= {b.key: Object(Global(METADATA, "BytesStorageMetadata"), None) for b in listed if b.offsets is None}
    storage = {_index(blob): _info(blob) for blob in listed}
    fields = {
        "state_dict_metadata": state,
        "planner_data": None,
        "storage_data": storage,
        "storage_meta": None,
        "version": "1.0.0",
    }
    return encode(Object(Global(METADATA, "Metadata"), fields))


def _tensor(tensor: WrittenTensor, chunks: list[Object]) -> Object:
    layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    memory_format = Call(Global(METADATA, "_MEM_FORMAT_ENCODING"), (CONTIGUOUS,))
    # The state of TensorProperties is a tuple (its __getstate__): dtype, layout, requires_grad, memory format,
    # pin_memory. Newer versions of torch append strides and take both lengths.
    properties = Object(Global(METADATA, "TensorProperties"), (tensor.dtype, layout, False, memory_format, False))
    fields = {"properties": properties, "size": _size(tensor.shape), "chunks": chunks}
    return Object(Global(METADATA, "TensorStorageMetadata"), fields)


class _Key(Object):
    """A MetadataIndex as the key of a dictionary, distinct from every other."""

    # The dataclass would hash its fields, of which one is a dictionary.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def _index(blob: WrittenBlob) -> Object:
    # `index` is a hint for lookups, which MetadataIndex does not compare. An object has no `offset`: the class's
    # default is None.
    fields = {"fqn": blob.key, "index": None}
    if blob.offsets is not None:
        fields["offset"] = _size(blob.offsets)  # type: ignore[assignment]
    return _Key(Global(METADATA, "MetadataIndex"), fields)


def _info(blob: WrittenBlob) -> Object:
    fields = {"relative_path": blob.file, "offset": blob.offset, "length": blob.num_bytes}
    return Object(Global(FILESYSTEM, "_StorageInfo"), fields)


def _size(numbers: tuple[int, ...]) -> Call:
    return Call(Global("torch", "Size"), (numbers,))
