"""`manifest.json` of a folder of embeddings: what they are of, and the hash of each file."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mt_data.records import Origin, Record, StoredFile

MANIFEST = "manifest.json"


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
    made_with: dict[str, Any] = Field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.shards) == self.job.num_shards
