"""manifest.json: what a checkpoint consists of, and the checksum of each part.

A directory that holds a manifest is a checkpoint; the manifest is written last and the directory is
renamed into place after that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mt_ckpt.native.checksum import ALGORITHM, checksum
from mt_ckpt.native.dtypes import ELEMENT_TYPES
from mt_core.errors import CheckpointError

FORMAT = "mt-checkpoint"
FORMAT_VERSION = 1
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


class StoredTensor(_Entry):
    """A tensor: its bytes begin `offset` bytes into `shard`, in row-major order, little-endian."""

    shard: str
    offset: Count
    dtype: str
    shape: tuple[Count, ...]
    checksum: Checksum

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_TYPES[self.dtype].num_bytes


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


def detect(path: Path) -> bool:
    """Whether `path` is a directory with a manifest."""
    return (path / MANIFEST_NAME).is_file()


def is_inside(name: str) -> bool:
    """Whether a relative path such as "files/tokenizer.json" stays within the directory it is relative to."""
    path = PurePosixPath(name)
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
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    if first_line != _first_line(content):
        raise CheckpointError(
            f"{file}: damaged (or not written by mt): the checksum in its first line is not that of the other lines"
        )
    return _parse(file, parse_json(file, b"{" + content))


def parse_json(file: Path, data: bytes) -> dict[str, Any]:
    """The JSON object that is the content of `file`; raises CheckpointError when it is none."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return content


def _no_manifest(path: Path) -> str:
    if not path.exists():
        return f"{path}: no such checkpoint"
    return f"{path}: not a complete mt checkpoint: it has no {MANIFEST_NAME}"


def _parse(file: Path, content: dict[str, Any]) -> Manifest:
    _check_version(file, content)
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
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
    ends = {name: shard.header_bytes for name, shard in manifest.shards.items()}
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in ELEMENT_TYPES:
            yield f"tensor {name}: dtype {tensor.dtype!r} is none of {', '.join(ELEMENT_TYPES)}"
            return
        if tensor.offset != ends.get(tensor.shard):
            yield f"tensor {name}: does not begin where the one before it in {tensor.shard!r} ends"
            return
        ends[tensor.shard] += tensor.num_bytes
    for name, shard in manifest.shards.items():
        if ends[name] != shard.num_bytes:
            yield f"shard {name}: {shard.num_bytes} bytes, but its tensors end at {ends[name]}"
