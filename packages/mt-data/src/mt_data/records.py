"""Records that are stored as JSON beside files: what the files are of, and their hashes."""

from __future__ import annotations

import io
import json
from hashlib import file_digest, sha256
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from mt_core.errors import DataError
from mt_core.paths import write_whole
from mt_data.indexed.manifest import BlockChecksummer, BlockChecksums

PIECE = 2**20
"""Bytes that are read at a time."""


class Record(BaseModel):
    """Base of what is stored as JSON: no further keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


R = TypeVar("R", bound=Record)


class Origin(Record):
    """sha256: of the content. path: where it was, for commands that are not given another path."""

    sha256: str
    path: str


class StoredFile(Record):
    name: str
    sha256: str


class BlockedFile(StoredFile):
    """A file that is read in parts, each of which can be checked alone."""

    blocks: BlockChecksums


def read_record(path: Path, kind: type[R]) -> R:
    """Raises DataError for a file that is missing or no such record."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        # The keys that lead to the value; none where the file is no JSON.
        where = ".".join(map(str, first["loc"]))
        problem = f"{where}: {first['msg']}" if where else first["msg"]
        raise DataError(f"{path} is damaged, or of another version of mt: {problem}") from error


def write_record(path: Path, record: Record) -> None:
    write_whole(path, (json.dumps(record.model_dump(), indent=1) + "\n").encode())


def require_unchanged(folder: Path, stored: StoredFile, cure: str) -> Path:
    """The path of a file whose bytes are those that were written. Raises DataError otherwise. cure: what to do then."""
    path = folder / stored.name
    try:
        with path.open("rb") as file:
            digest = file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; {cure}") from error
    if digest != stored.sha256:
        raise DataError(
            f"{path} is damaged: its SHA-256 is {digest[:16]}..., the manifest has {stored.sha256[:16]}...; {cure}"
        )
    return path


def write_array(folder: Path, name: str, array: np.ndarray) -> StoredFile:
    """Write an array in NumPy's format."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    data = buffer.getvalue()
    write_whole(folder / name, data)
    return StoredFile(name=name, sha256=sha256(data).hexdigest())


def blocked_file(path: Path) -> BlockedFile:
    """The record of a file that has been written."""
    digest, blocks = sha256(), BlockChecksummer()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
            blocks.update(memoryview(piece))
    return BlockedFile(name=path.name, sha256=digest.hexdigest(), blocks=blocks.record())


def is_unchanged(folder: Path, stored: StoredFile | None) -> bool:
    """Whether there is a file with the bytes that were written."""
    try:
        return stored is not None and require_unchanged(folder, stored, "").is_file()
    except DataError:
        return False
