"""A folder of embeddings: its `manifest.json` with the origin and the hash of each file, and reading it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from mt_core.errors import DataError
from mt_data.records import Origin, Record, StoredFile, read_record, require_unchanged

# -- defaults ----------------------------------------------------------------------------------------

BATCH_SIZE = 128
SHARD_ROWS = 8192
"""What a killed run may lose on each rank."""


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


# -- reading; each file is compared with its hash before it is used ----------------------------------

CURE = "run the same mt retrieve embed again, which replaces it"


class Embeddings:
    """Raises DataError for a folder that is incomplete or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_record(folder / MANIFEST, Manifest)
        if not self.manifest.is_complete:
            raise DataError(f"{folder} is not complete; run the same mt retrieve embed again, which finishes it")

    def __len__(self) -> int:
        return self.manifest.job.count

    @property
    def dim(self) -> int:
        assert self.manifest.dim is not None
        return self.manifest.dim

    def shards(self) -> Iterator[NDArray[np.float16]]:
        """Mapped into memory: [rows, dim] each, in the order of the evidence."""
        for shard in self.manifest.shards:
            # Hashed as it is reached, not all shards at the opening.
            path = require_unchanged(self.folder, shard.embeddings, CURE)
            matrix = np.lib.format.open_memmap(path, mode="r")
            if matrix.shape != (shard.rows, self.dim):
                raise DataError(f"{path} has the shape {list(matrix.shape)}, the manifest has {[shard.rows, self.dim]}")
            yield matrix
