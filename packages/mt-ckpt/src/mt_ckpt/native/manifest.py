"""manifest.json: the contents of a checkpoint, and the checksum of each part.

A directory that holds a manifest is a checkpoint; the manifest is written last and the directory is
renamed into place after that.

Version 2: a tensor consists of pieces, slices of it that ranks have written into separate files.
Version 1 had whole tensors only, and is read as tensors of one piece.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mt_ckpt.files.checksum import ALGORITHM, checksum, parse_json
from mt_ckpt.files.dtypes import ELEMENT_TYPES
from mt_ckpt.files.tiling import tiles
from mt_core.errors import CheckpointError
from mt_core.tensor_slice import TensorSlice

FORMAT = "mt-checkpoint"
FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"
METADATA_NAME = "metadata.json"
FILES_FOLDER = "files"

Count = Annotated[int, Field(ge=0)]
Checksum = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StoredFile(_Entry):
    """A small file, checked as a whole."""

    num_bytes: Count
    checksum: Checksum


class StoredShard(_Entry):
    """A safetensors file: `header_bytes` of header, then tensors without gaps."""

    num_bytes: Count
    header_bytes: Count
    header_checksum: Checksum


class StoredPiece(_Entry):
    """A slice of a tensor, from element `start` on: its bytes begin `offset` bytes into `shard`, in row-major order,
    little-endian."""

    shard: str
    offset: Count
    start: tuple[Count, ...]
    shape: tuple[Count, ...]
    checksum: Checksum

    @property
    def tensor_slice(self) -> TensorSlice:
        return TensorSlice(self.start, self.shape)


class StoredTensor(_Entry):
    """A tensor, which its pieces cover without overlapping."""

    dtype: str
    shape: tuple[Count, ...]
    pieces: tuple[StoredPiece, ...]

    @property
    def element_bytes(self) -> int:
        return ELEMENT_TYPES[self.dtype].num_bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.element_bytes

    def bytes_of(self, piece: StoredPiece) -> int:
        return piece.tensor_slice.numel * self.element_bytes


class Manifest(_Entry):
    """The whole manifest. Paths are relative to the checkpoint, with forward slashes."""

    format: str = FORMAT
    version: int = FORMAT_VERSION
    written_by: str
    checksum_algorithm: str = ALGORITHM
    files: dict[str, StoredFile]
    shards: dict[str, StoredShard]
    tensors: dict[str, StoredTensor]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file other than the manifest."""
        files = {name: file.num_bytes for name, file in self.files.items()}
        return files | {name: shard.num_bytes for name, shard in self.shards.items()}


def piece_name(name: str, shape: tuple[int, ...], tensor_slice: TensorSlice) -> str:
    """The name of a piece in its safetensors file: the tensor's own, and where the piece begins if it is not whole."""
    return name if tensor_slice.shape == shape else f"{name}@{','.join(map(str, tensor_slice.start))}"


def detect(path: Path) -> bool:
    """Whether `path` is a directory with a manifest."""
    return (path / MANIFEST_NAME).is_file()


def is_inside(name: str) -> bool:
    """Whether a relative path such as "files/tokenizer.json" stays within the directory it is relative to."""
    path = PurePosixPath(name)
    # `str(path) == name` rejects forms that PurePosixPath normalizes ("a//b", "./a", "a/"): a file has one name only.
    # NUL would end the name in a system call.
    return bool(path.parts) and str(path) == name and not path.is_absolute() and not {"..", "\0"} & {*path.parts, *name}


# ---------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------


def to_bytes(manifest: Manifest) -> bytes:
    """JSON with one line for each file and tensor. The first line holds the checksum of all other bytes."""
    content = (",\n".join(_sections(manifest)) + "\n}\n").encode()
    return _first_line(content) + b"\n" + content


def _first_line(content: bytes) -> bytes:
    return f'{{"manifest_checksum": "{checksum(content)}",'.encode()


def _sections(manifest: Manifest) -> Iterator[str]:
    # One line per entry in place of json.dumps(indent=...): a manifest of thousands of tensors stays readable and can
    # be searched by line.
    for key in type(manifest).model_fields:
        value = getattr(manifest, key)
        yield f'"{key}": {_table(value) if isinstance(value, Mapping) else json.dumps(value)}'


def _table(entries: Mapping[str, BaseModel]) -> str:
    lines = [f"  {json.dumps(name)}: {json.dumps(entry.model_dump())}" for name, entry in entries.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


# ---------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint directory `path`.

    Raises CheckpointError when it is missing, damaged, of a newer version, or contradicts itself.
    """
    file = path / MANIFEST_NAME
    try:
        first_line, _, content = file.read_bytes().partition(b"\n")
    except FileNotFoundError:
        raise CheckpointError(_no_manifest(path)) from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    if first_line != _first_line(content):
        raise CheckpointError(
            f"{file}: damaged (or not written by mt): the checksum in its first line is not that of the other lines"
        )
    # The first line opens the object with its brace; the other lines lack it.
    return _parse(file, parse_json(file, b"{" + content))


def _no_manifest(path: Path) -> str:
    if not path.exists():
        return f"{path}: no such checkpoint"
    return f"{path}: not a complete mt checkpoint: it has no {MANIFEST_NAME}"


def _parse(file: Path, content: dict[str, Any]) -> Manifest:
    _check_version(file, content)
    try:
        # The version has been checked, so that a version without an entry is the present one.
        manifest = Manifest.model_validate(_MIGRATIONS.get(content["version"], _unchanged)(content))
    except ValidationError as error:
        first = error.errors()[0]
        # The path of the field in the manifest, such as tensors.model.a.pieces.0.shape.
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{file}: {where}: {first['msg']}") from None
    for problem in _contradictions(manifest):
        raise CheckpointError(f"{file}: {problem}")
    return manifest


def _check_version(file: Path, content: dict[str, Any]) -> None:
    version = content.get("version")
    if content.get("format") != FORMAT or not isinstance(version, int) or version < 1:
        raise CheckpointError(f"{file}: format {content.get('format')!r}, version {version!r} is not an mt checkpoint")
    if version > FORMAT_VERSION:
        writer = str(content.get("written_by", "a newer mt-ckpt"))
        newer = writer.replace("mt-ckpt ", "mt-ckpt>=", 1)
        raise CheckpointError(
            f"{file}: version {version} of the format, written by {writer}; this mt-ckpt reads versions up to "
            f'{FORMAT_VERSION}: pip install "{newer}"'
        )


def _contradictions(manifest: Manifest) -> Iterator[str]:
    if manifest.checksum_algorithm != ALGORITHM:
        yield f"checksum_algorithm {manifest.checksum_algorithm!r} is not {ALGORITHM!r}"
    if METADATA_NAME not in manifest.files:
        yield f"files has no {METADATA_NAME}"
    for name in manifest.sizes:
        if not is_inside(name):
            yield f"the path {name!r} leads out of the checkpoint"
    yield from _tensor_contradictions(manifest)


def _tensor_contradictions(manifest: Manifest) -> Iterator[str]:
    pieces: dict[str, list[tuple[int, int, str]]] = {name: [] for name in manifest.shards}
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in ELEMENT_TYPES:
            yield f"tensor {name}: dtype {tensor.dtype!r} is none of {', '.join(ELEMENT_TYPES)}"
            return
        # Stop at the first: later checks use the pieces' shards, which may not exist.
        for problem in _piece_contradictions(tensor, pieces):
            yield f"tensor {name}: {problem}"
            return
        for piece in tensor.pieces:
            pieces[piece.shard].append((piece.offset, piece.offset + tensor.bytes_of(piece), name))
    for shard, stored in manifest.shards.items():
        # Together the header and the pieces have to fill the file, so that every byte has a checksum.
        yield from _gaps(shard, stored, sorted(pieces[shard]))


def _piece_contradictions(tensor: StoredTensor, shards: Collection[str]) -> Iterator[str]:
    for piece in tensor.pieces:
        if piece.shard not in shards:
            yield f"a piece is in {piece.shard!r}, which is not listed"
        if len(piece.start) != len(piece.shape) or not piece.tensor_slice.is_inside(tensor.shape):
            yield f"a piece from {list(piece.start)} of shape {list(piece.shape)} is not inside {list(tensor.shape)}"
    # Readers do not fill what no piece has: an element without one would be uninitialized memory.
    if not tiles(tensor.shape, [piece.tensor_slice for piece in tensor.pieces]):
        yield "its pieces do not cover it, each element once"


def _gaps(name: str, shard: StoredShard, pieces: list[tuple[int, int, str]]) -> Iterator[str]:
    """pieces: first byte, last byte + 1, tensor; in order."""
    end = shard.header_bytes
    for first, last, tensor in pieces:
        if first != end:
            yield f"tensor {tensor}: does not begin where the one before it in {name!r} ends"
            return
        end = last
    if end != shard.num_bytes:
        yield f"shard {name}: {shard.num_bytes} bytes, but its tensors end at {end}"


# ---------------------------------------------------------------------------------------------------
# Earlier versions
# ---------------------------------------------------------------------------------------------------


def _unchanged(content: dict[str, Any]) -> dict[str, Any]:
    return content


def _from_version_1(content: dict[str, Any]) -> dict[str, Any]:
    """Tensors were whole: each had one shard, offset and checksum."""
    tensors = content.get("tensors")
    if not isinstance(tensors, dict):
        return content
    return {**content, "tensors": {n: _as_one_piece(t) for n, t in tensors.items()}}


def _as_one_piece(tensor: Any) -> Any:
    if not isinstance(tensor, dict) or not isinstance(tensor.get("shape"), list):
        return tensor
    piece = {key: value for key, value in tensor.items() if key != "dtype"}
    whole = {"dtype": tensor.get("dtype"), "shape": tensor["shape"]}
    return {**whole, "pieces": [{**piece, "start": [0] * len(tensor["shape"])}]}


_MIGRATIONS = {1: _from_version_1}
