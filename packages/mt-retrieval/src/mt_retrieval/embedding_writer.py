"""Embeds evidence into a folder, shard by shard, on any number of ranks. Killed, the same call continues.

A shard is complete when its files have the hashes of its record, which is written last. What is in a shard does not
depend on the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError, DataError
from mt_core.parallel.context import wait_for_all
from mt_data.records import Origin, read_record, require_unchanged, write_array, write_record
from mt_retrieval.embeddings import MANIFEST, EmbeddingJob, Manifest, Shard, Source
from mt_retrieval.encoder import Encoder, computation
from mt_retrieval.evidence import Evidence

DIGITS = 5
OnProgress = Callable[[int, int], None]
"""(rows done by this rank, rows of this rank)"""


def embed_evidence(
    encoder: Encoder,
    evidence: Evidence,
    folder: Path,
    *,
    shard_rows: int,
    batch_size: int,
    on_progress: OnProgress = lambda done, total: None,
) -> Manifest:
    """Writes the embeddings of all passages, and returns the manifest. Collective.

    Raises ConfigError for a folder with embeddings of something else, DataError for embeddings that fp16 cannot hold.
    """
    if encoder.ctx.is_writer:
        _begin(folder, _job(encoder, evidence, shard_rows, batch_size))
    wait_for_all()
    # The job as it is on the disk, for every rank.
    shards = ShardWriter(encoder, evidence, folder, read_record(folder / MANIFEST, Manifest).job)
    # Shards are dealt to replicas; a shard's batches are its own, so that its bytes do not depend on the number of
    # ranks.
    rank_shards = range(encoder.ctx.dp.rank, shards.job.num_shards, encoder.ctx.dp.size)
    done, total = 0, sum(len(shards.job.rows_of(shard)) for shard in rank_shards)

    def on_rows(rows: int) -> None:
        on_progress(done + rows, total)

    for shard in rank_shards:
        # The ranks of a replica decide the same: a shard is written after its collective computation.
        if not shards.is_written(shard):
            shards.write(shard, on_rows)
        done += len(shards.job.rows_of(shard))
        on_rows(0)
    wait_for_all()
    if encoder.ctx.is_writer:
        shards.finish()
    wait_for_all()
    return read_record(folder / MANIFEST, Manifest)


def _job(encoder: Encoder, evidence: Evidence, shard_rows: int, batch_size: int) -> EmbeddingJob:
    return EmbeddingJob(
        source=Source(
            encoder=Origin(sha256=encoder.fingerprint, path=str(encoder.checkpoint.absolute())),
            evidence=Origin(sha256=evidence.fingerprint(), path=str(Path(evidence.name).absolute())),
            seq_length=encoder.seq_length,
        ),
        count=len(evidence),
        shard_rows=shard_rows,
        batch_size=batch_size,
        precision=encoder.config.precision.dtype,
    )


def _begin(folder: Path, job: EmbeddingJob) -> None:
    """Make the folder, or check that what is in it belongs to the same job."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        write_record(manifest, Manifest(job=job))
        return
    stored = read_record(manifest, Manifest).job
    differences = [f"{name}: {was} there, {now} now" for name, was, now in _compared(stored, job) if was != now]
    if differences:
        raise ConfigError(
            f"--output {folder} has embeddings of another job ({'; '.join(differences)}); give another folder"
        )
    # Another path of the same content is the one to use from now on.
    write_record(manifest, Manifest(job=job))


def _compared(stored: EmbeddingJob, job: EmbeddingJob) -> Iterator[tuple[str, object, object]]:
    yield "SHA-256 of the encoder", stored.source.encoder.sha256[:16], job.source.encoder.sha256[:16]
    yield "SHA-256 of the evidence", stored.source.evidence.sha256[:16], job.source.evidence.sha256[:16]
    yield "seq_length", stored.source.seq_length, job.source.seq_length
    for name in ("count", "shard_rows", "batch_size", "precision"):
        yield name, getattr(stored, name), getattr(job, name)


@dataclass(frozen=True)
class ShardWriter:
    """Embeds the rows of a shard, and writes them with their record."""

    encoder: Encoder
    evidence: Evidence
    folder: Path
    job: EmbeddingJob

    def is_written(self, shard: int) -> bool:
        """Whether its files are there, and are those of its record."""
        try:
            record = self._record(shard)
            require_unchanged(self.folder, record.embeddings, "")
            require_unchanged(self.folder, record.ids, "")
        except DataError:
            return False
        return True

    def write(self, shard: int, on_rows: Callable[[int], None]) -> None:
        """Collective over the ranks of a model, of which the first one writes."""
        rows = self.job.rows_of(shard)
        embeddings = self._embed(rows, on_rows).astype(np.float16)
        if not np.isfinite(embeddings).all():
            raise DataError(
                f"shard {shard} has embeddings that are not finite in fp16 (of at most 65504); the weights of "
                f"{self.encoder.checkpoint} are damaged, or need model.biencoder_projection_dim to scale them down"
            )
        # All ranks of tp have the same embeddings.
        if self.encoder.ctx.axis("model").rank:
            return
        ids = np.array([self.evidence.passage(row).id for row in rows], np.int64)
        record = Shard(
            rows=len(rows),
            embeddings=write_array(self.folder, f"embeddings-{shard:0{DIGITS}}.npy", embeddings),
            ids=write_array(self.folder, f"ids-{shard:0{DIGITS}}.npy", ids),
        )
        # After both files: the record makes the shard complete.
        write_record(self._record_path(shard), record)

    def finish(self) -> None:
        """Write the manifest of all shards."""
        # Records of all ranks, whose barrier has been passed.
        shards = tuple(self._record(shard) for shard in range(self.job.num_shards))
        first = np.lib.format.open_memmap(self.folder / shards[0].embeddings.name, mode="r")
        made_with = computation(self.encoder.config, self.encoder.ctx)
        manifest = Manifest(job=self.job, dim=first.shape[1], shards=shards, made_with=made_with)
        write_record(self.folder / MANIFEST, manifest)

    def _embed(self, rows: range, on_rows: Callable[[int], None]) -> NDArray[np.float32]:
        """[rows, P]. Passages of about the same length share a batch, so that little is padding."""
        sequences = [self.encoder.pairs.passage(*self.evidence.tokens(row)) for row in rows]
        # Stable: equal lengths stay in order, and a shard has the same batches in every run.
        order = np.argsort([len(sequence) for sequence in sequences], kind="stable")
        parts = []
        for first in range(0, len(order), self.job.batch_size):
            batch = order[first : first + self.job.batch_size]
            parts.append(self.encoder.vectors([sequences[number] for number in batch], "document"))
            on_rows(first + len(batch))
        vectors = np.concatenate(parts)
        return vectors[np.argsort(order, kind="stable")]

    def _record(self, shard: int) -> Shard:
        return read_record(self._record_path(shard), Shard)

    def _record_path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:0{DIGITS}}.json"
