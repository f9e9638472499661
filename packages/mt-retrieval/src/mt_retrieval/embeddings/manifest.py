"""`manifest.json` of a folder of embeddings: what they are of, and the hash of each file."""

from __future__ import annotations

import json
from hashlib import file_digest
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from mt_core.errors import DataError
from mt_core.paths import write_whole

MANIFEST = "manifest.json"


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


class Shard(Record):
    """embeddings: fp16 [rows, dim]. ids: int64 [rows]."""

    rows: int
    embeddings: StoredFile
    ids: StoredFile


class Source(Record):
    """What embeddings are of. seq_length: tokens of the longest passage, which is cut behind them."""

    encoder: Origin
    evidence: Origin
    seq_length: int


class EmbeddingJob(Record):
    """What the bytes of the shards depend on. shard_rows: rows of each shard but the last."""

    source: Source
    count: int
    shard_rows: int
    batch_size: int
    precision: str

    @property
    def num_shards(self) -> int:
        return -(-self.count // self.shard_rows)

    def rows_of(self, shard: int) -> range:
        return range(shard * self.shard_rows, min((shard + 1) * self.shard_rows, self.count))


class Manifest(Record):
    """shards: all of them once the job is complete, before that none."""

    format: Literal["mt-embeddings"] = "mt-embeddings"
    version: Literal[1] = 1
    job: EmbeddingJob
    dim: int | None = None
    shards: tuple[Shard, ...] = ()
    made_with: dict[str, Any] = {}

    @property
    def is_complete(self) -> bool:
        return len(self.shards) == self.job.num_shards


def read_record(path: Path, kind: type[R]) -> R:
    """Raises DataError for a file that is missing or no such record."""
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValidationError, UnicodeDecodeError) as error:
        first = str(error).splitlines()
        raise DataError(f"{path} is damaged, or of another version of mt: {' '.join(first[1:3])}") from error


def write_record(path: Path, record: Record) -> None:
    write_whole(path, (json.dumps(record.model_dump(), indent=1) + "\n").encode())


def require_unchanged(folder: Path, stored: StoredFile, cure: str) -> Path:
    """The path of a file whose bytes are those that were written. Raises DataError otherwise. cure: what to do then."""
    path = folder / stored.name
    try:
        with path.open("rb") as file:
            found = file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; {cure}") from error
    if found != stored.sha256:
        raise DataError(
            f"{path} is damaged: its SHA-256 is {found[:16]}..., the manifest has {stored.sha256[:16]}...; {cure}"
        )
    return path
