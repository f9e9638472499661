"""The index and the common part of a PyTorch distributed checkpoint (DCP), read without torch's unpickler, and written.

`.metadata` is a pickle of `torch.distributed.checkpoint.metadata.Metadata`: for each key a tensor's whole shape and the
chunks in which it was saved, or that it is bytes; and for each chunk the file, offset and length of what torch.save
wrote. Data files are such pieces end to end.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.files.checksum_file import WrittenFiles
from mt_ckpt.files.tiling import tiles
from mt_ckpt.megatron.folder import find_iteration
from mt_ckpt.megatron.versions import Conventions, all_conventions
from mt_ckpt.pickles.encode import Call, Global, Object, encode
from mt_ckpt.pickles.inert_objects import Inert
from mt_ckpt.pickles.storages import Extent
from mt_ckpt.pickles.torch_file import StoredTensor, open_torch_file
from mt_ckpt.pickles.unpickler import SafeUnpickler
from mt_core.errors import CheckpointError
from mt_core.tensor_slice import TensorSlice

METADATA_FILE = ".metadata"


@dataclass(frozen=True)
class Blob:
    """What one call of torch.save wrote, in a data file."""

    file: Path
    extent: Extent

    def value(self) -> Any:
        """The object, tensors not read. Raises CheckpointError."""
        return open_torch_file(self.file, self.extent).value


@dataclass(frozen=True)
class Chunk:
    """A slice of a tensor: its offsets and sizes, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    blob: Blob

    @cached_property
    def stored(self) -> StoredTensor:
        """Opened once: a stack of layers is read layer by layer."""
        value = self.blob.value()
        if not isinstance(value, StoredTensor) or value.shape != self.sizes:
            raise CheckpointError(
                f"{self.blob.file}: damaged: at byte {self.blob.extent.offset} is no tensor of shape {list(self.sizes)}"
            )
        return value


@dataclass(frozen=True)
class ChunkedTensor:
    """A whole tensor, in chunks that cover it."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Sequence[Chunk]

    def read(self) -> Tensor:
        return self.read_slice((0,) * len(self.shape), self.shape)

    def read_slice(self, begin: Sequence[int], end: Sequence[int]) -> Tensor:
        """Elements [begin, end) in every dimension. Only overlapping chunks are read."""
        # Left uninitialized: `_tensor` has checked that chunks tile the whole, so that every element is written.
        target = torch.empty([high - low for low, high in zip(begin, end, strict=True)], dtype=self.dtype)
        for chunk in self.chunks:
            low = [max(a, b) for a, b in zip(begin, chunk.offsets, strict=True)]
            high = [min(a, b + size) for a, b, size in zip(end, chunk.offsets, chunk.sizes, strict=True)]
            # all() of no dimensions is true: a scalar is one chunk.
            if all(a < b for a, b in zip(low, high, strict=True)):
                place = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, begin, strict=True))
                target[place] = _read_part(chunk, low, high)
        return target


@dataclass(frozen=True)
class Index:
    """A DCP folder: its tensors and its pickled objects, by key."""

    folder: Path
    tensors: Mapping[str, ChunkedTensor]
    objects: Mapping[str, Blob]


def read_index(folder: Path) -> Index:
    """Raises CheckpointError when the index is missing or damaged, or when what it lists is not all there."""
    file = folder / METADATA_FILE
    try:
        # Unlike the data files, whose archives have checksums, the index is a bare pickle.
        pickled = WrittenFiles(folder).read(file)
        metadata = SafeUnpickler(io.BytesIO(pickled), str(file)).load()
    except OSError as error:
        raise CheckpointError(f"{file}: missing or unreadable: {error.strerror}") from None
    try:
        return _parse(folder, metadata)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise CheckpointError(f"{file}: damaged, or not the index of a distributed checkpoint: {error!r}") from None


def _parse(folder: Path, metadata: Inert) -> Index:
    entries = metadata.attributes["state_dict_metadata"]
    blobs: dict[tuple[str, tuple[int, ...] | None], Blob] = {}
    sizes: dict[Path, int] = {}
    for index, info in metadata.attributes["storage_data"].items():
        offset = index.attributes.get("offset")  # absent for objects, in newer versions of torch
        key = (str(index.attributes["fqn"]), None if offset is None else tuple(offset))
        blobs[key] = _blob(folder, info.attributes, sizes)
    tensors, objects = {}, {}
    for key, entry in entries.items():
        # Classes of torch are fakes here, which keep their names only.
        if type(entry).__name__ == "TensorStorageMetadata":
            tensors[key] = _tensor(folder, key, entry.attributes, blobs)
        elif (key, None) in blobs:
            objects[key] = blobs[key, None]
        else:
            raise CheckpointError(f"{folder / METADATA_FILE}: does not say where {key} is")
    return Index(folder, tensors, objects)


def _blob(folder: Path, info: Mapping[str, Any], sizes: dict[Path, int]) -> Blob:
    name = str(info["relative_path"])
    file = folder / name
    # A name such as ../x would read outside of the checkpoint.
    if Path(name).name != name:
        raise CheckpointError(f"{folder / METADATA_FILE}: refers to {name!r}, which is not a file beside it")
    # One stat for each data file, which may hold thousands of chunks.
    if file not in sizes:
        try:
            sizes[file] = file.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{file}: missing or unreadable: {error.strerror}") from None
    extent = Extent(int(info["offset"]), int(info["length"]))
    # Truncation is found when the index is opened, not in the middle of a conversion.
    if extent.offset + extent.num_bytes > sizes[file]:
        raise CheckpointError(f"{file}: truncated: {sizes[file]} bytes instead of {extent.offset + extent.num_bytes}")
    return Blob(file, extent)


def _tensor(
    folder: Path, key: str, entry: Mapping[str, Any], blobs: Mapping[tuple[str, tuple[int, ...] | None], Blob]
) -> ChunkedTensor:
    shape = tuple(entry["size"])
    chunks = []
    for chunk in entry["chunks"]:
        offsets, sizes = tuple(chunk.attributes["offsets"]), tuple(chunk.attributes["sizes"])
        if (key, offsets) not in blobs:
            raise CheckpointError(f"{folder / METADATA_FILE}: does not say where the chunk {list(offsets)} of {key} is")
        chunks.append(Chunk(offsets, sizes, blobs[key, offsets]))
    # The usual damage, a chunk that is missing, gets a message of its own; `tiles` finds overlaps too.
    covered = sum(math.prod(chunk.sizes) for chunk in chunks)
    if covered != math.prod(shape):
        raise CheckpointError(
            f"{folder / METADATA_FILE}: the chunks of {key} have {covered} elements, the tensor {math.prod(shape)}: a "
            "part was not saved"
        )
    if not tiles(shape, [TensorSlice(chunk.offsets, chunk.sizes) for chunk in chunks]):
        raise CheckpointError(
            f"{folder / METADATA_FILE}: the chunks of {key} do not tile {list(shape)}: some elements are in "
            "none of them, or in several"
        )
    return ChunkedTensor(key, shape, _dtype(entry["properties"]), chunks)


def _dtype(properties: Inert) -> torch.dtype:
    """TensorProperties writes a tuple that begins with the dtype; older versions of torch its attributes."""
    dtype = properties.attributes.get("dtype") or properties.arguments[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {dtype!r}")
    return dtype


def _read_part(chunk: Chunk, low: Sequence[int], high: Sequence[int]) -> Tensor:
    """Elements [low, high) of the whole tensor, all within `chunk`; full rows of it are read by themselves."""
    stored = chunk.stored
    begin = [a - o for a, o in zip(low, chunk.offsets, strict=True)]
    size = [b - a for a, b in zip(low, high, strict=True)]
    # Rows of a contiguous chunk follow one another: a run of whole rows is one range of bytes, of which no more is
    # read. `and size` excludes scalars.
    if tuple(size[1:]) == chunk.sizes[1:] and size:
        row = math.prod(chunk.sizes[1:])
        return stored.read_flat(begin[0] * row, size[0] * row).view(size)
    # A cut through other dimensions: the chunk is read whole, then sliced.
    part = stored.read()
    return part[tuple(slice(b, b + s) for b, s in zip(begin, size, strict=True))]


# -- common part: arguments, iteration, schedule, optimizer groups -----------------------------------

COMMON_FILE = "common.pt"
"""Until Megatron-Core 0.18; since 0.19 the same is an object in the index."""
COMMON_KEY = "common_state/shard_0_1"
MARK_FILE = "metadata.json"
"""Written last, so that a checkpoint with it is complete."""
RUN_CONFIG = "run_config.yaml"
_HAS_PEFT = re.compile(r"^peft:[ \t]*(?:#.*)?\n[ \t]+\S", re.MULTILINE)
BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


def detect(path: Path) -> bool:
    """Whether `path` is, or its tracker names, a distributed checkpoint."""
    try:
        folder = find_iteration(path)
    except CheckpointError:
        return False
    # Both files: any other program's DCP folder has an index, but no mark.
    return (folder / METADATA_FILE).is_file() and (folder / MARK_FILE).is_file() and not holds_adapters(folder)


def holds_adapters(folder: Path) -> bool:
    """Whether Megatron-Bridge says beside an iteration that it has parameters of adapters alone."""
    try:
        return _HAS_PEFT.search((folder / RUN_CONFIG).read_text(encoding="utf-8")) is not None
    except (OSError, UnicodeDecodeError):
        return False


def require_backend(folder: Path) -> None:
    """Raises CheckpointError unless the folder says that it is complete and of the format that is read here."""
    file = folder / MARK_FILE
    try:
        mark = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: incomplete: it has no {MARK_FILE}, which Megatron writes last") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None
    if not isinstance(mark, dict) or mark.get("sharded_backend") != BACKEND["sharded_backend"]:
        raise CheckpointError(f"{file}: sharded_backend is not torch_dist: {mark}")


def newest_that_writes(folder: Path) -> Conventions:
    """What the version that wrote a folder can have been, as far as the folder shows."""
    with_file = (folder / COMMON_FILE).is_file()
    # The newest of those that agree with the folder: whether common.pt exists is all that it shows.
    return next(rules for rules in all_conventions() if rules.common_file == with_file)


def read_common(index: Index) -> Mapping[str, Any]:
    """Raises CheckpointError when it is missing."""
    file = index.folder / COMMON_FILE
    if file.is_file():
        value = open_torch_file(file).value
    elif COMMON_KEY in index.objects:
        value = index.objects[COMMON_KEY].value()
    else:
        raise CheckpointError(f"{index.folder}: has neither {COMMON_FILE} nor {COMMON_KEY}: no checkpoint of Megatron")
    # An object of the index is saved as a list of one (see `DistPlan`), the file holds the dictionary.
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, dict):
        raise CheckpointError(f"{index.folder}: its common state is a {type(value).__name__}, expected a dictionary")
    return value


# -- writing -----------------------------------------------------------------------------------------

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
    state = {key: _written_tensor(tensor, chunks[key]) for key, tensor in tensors.items()}
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


def _written_tensor(tensor: WrittenTensor, chunks: list[Object]) -> Object:
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
