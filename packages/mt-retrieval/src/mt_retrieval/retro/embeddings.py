"""The embeddings of the database's chunks: PROJECT/embeddings, float16 in blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_core.specs import Tokenizer
from mt_data.datasets.fingerprints import combined
from mt_data.datasets.retro.database import ChunkDatabase
from mt_data.datasets.retro.project import MANIFEST
from mt_data.records import Origin, Record, read_record, write_record
from mt_retrieval.retro.blocks import Blocks, OnProgress, ranges, write_blocks
from mt_retrieval.retro.embedder import ChunkEmbedder, open_embedder
from mt_retrieval.retro.jobs import require_same_job
from mt_retrieval.retro.options import BATCH_SIZE


class EmbeddingsJob(Record):
    """What the vectors depend on: fingerprints of the database and the embedder, and its settings."""

    database: str
    embedder: str
    settings: dict[str, int | str]
    count: int
    block_rows: int


class EmbeddingsManifest(Record):
    """embedder: what it was and where."""

    format: Literal["mt-retro-embeddings"] = "mt-retro-embeddings"
    version: Literal[1] = 1
    job: EmbeddingsJob
    embedder: Origin


class ChunkEmbeddings:
    """Block n has the vectors of chunks n block_rows ... of the database: float16 [rows, dim]."""

    def __init__(self, project: Path) -> None:
        self.folder = project / "embeddings"
        self.manifest = read_record(self.folder / MANIFEST, EmbeddingsManifest)
        self.rows = ranges(self.manifest.job.count, self.manifest.job.block_rows)
        self.files = Blocks(self.folder, "embeddings", "run mt retro index add again, which replaces it")

    def write(
        self, database: ChunkDatabase, embedder: ChunkEmbedder, chosen: Sequence[int], on_progress: OnProgress
    ) -> None:
        """The chosen blocks that are not there. Collective."""

        def compute(number: int, on_rows: Callable[[int], None]) -> NDArray[np.float16]:
            return self.compute(database, embedder, number, on_rows)

        write_blocks(self.files, list(map(len, self.rows)), chosen, compute, embedder.share, on_progress)

    def compute(
        self, database: ChunkDatabase, embedder: ChunkEmbedder, number: int, on_rows: Callable[[int], None]
    ) -> NDArray[np.float16]:
        """Raises DataError for vectors that fp16 cannot hold."""
        chunks = [database.tokens(row) for row in self.rows[number]]
        # An overflow gives inf, which the check below finds.
        with np.errstate(over="ignore"):
            vectors = embedder.vectors(chunks, on_rows).astype(np.float16)
        if not np.isfinite(vectors).all():
            raise DataError(
                f"block {number} has embeddings that are not finite in fp16 (of at most 65504); the weights of "
                f"{embedder.name} are damaged"
            )
        return vectors

    def matrices(self) -> list[NDArray[np.float16]]:
        """All blocks, mapped into memory. Raises DataError where one is missing or damaged."""
        return [np.asarray(self.files.read(number)) for number in range(len(self.rows))]

    def fingerprint(self) -> str:
        """SHA-256 of all vectors."""
        return combined([self.files.record(number).sha256 for number in range(len(self.rows))])


def begin_embeddings(project: Path, database: ChunkDatabase, embedder: ChunkEmbedder, block_rows: int) -> None:
    """Make the folder, or check that what is in it belongs to the same job. Raises ConfigError if it does not."""
    job = EmbeddingsJob(
        database=database.manifest.fingerprint,
        embedder=embedder.fingerprint,
        settings=embedder.settings,
        count=len(database),
        block_rows=block_rows,
    )
    path = project / "embeddings" / MANIFEST
    if path.exists():
        require_same_job(path.parent, read_record(path, EmbeddingsManifest).job, job)
    write_record(path, EmbeddingsManifest(job=job, embedder=Origin(sha256=embedder.fingerprint, path=embedder.name)))


def recorded_embedder(
    project: Path,
    tokenizer: Tokenizer,
    *,
    name: str | None = None,
    device: str = "auto",
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> ChunkEmbedder:
    """That of the project's embeddings, with the batch size that made them. name: where it is now, if it has moved.

    Raises DataError for a project whose index is not trained.
    """
    manifest = read_record(project / "embeddings" / MANIFEST, EmbeddingsManifest)
    # The batch size changes the padding, and with it the last bits of a vector.
    batch_size = int(manifest.job.settings.get("batch_size", BATCH_SIZE))
    return open_embedder(
        name or manifest.embedder.path, tokenizer, batch_size=batch_size, device=device, settings=settings
    )
