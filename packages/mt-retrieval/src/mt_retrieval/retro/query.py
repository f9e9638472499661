"""The neighbours of every chunk of a text: PROJECT/query/TEXT."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError, DataError
from mt_core.parallel.context import is_writer, wait_for_all
from mt_core.paths import writing
from mt_data.datasets.retro.database import ChunkDatabase, TokenStream
from mt_data.datasets.retro.project import (
    MANIFEST,
    NEIGHBORS,
    NeighborsJob,
    NeighborsManifest,
    Text,
    neighbors_folder,
    read_neighbors,
)
from mt_data.indexed.dataset import IndexedDataset
from mt_data.records import blocked_file, is_unchanged, read_record, write_record
from mt_retrieval.retro.blocks import (
    NUM_NEIGHBORS,
    NUM_NEIGHBORS_QUERY,
    ROWS_OF_BLOCK,
    Bars,
    Blocks,
    OnProgress,
    no_bars,
    ranges,
    require_same_job,
    write_blocks,
)
from mt_retrieval.retro.database import open_database
from mt_retrieval.retro.embeddings import ChunkEmbedder
from mt_retrieval.retro.index import Search, open_search, read_index, require_of_index

SLICE = 1000
"""Chunks that are searched at a time."""


def find_neighbors(
    project: Path,
    prefix: str,
    embedder: ChunkEmbedder,
    *,
    seq_length: int | None,
    num_neighbors: int = NUM_NEIGHBORS,
    num_neighbors_query: int = NUM_NEIGHBORS_QUERY,
    search_parameters: str | None = None,
    block_rows: int = ROWS_OF_BLOCK,
    bars: Bars = no_bars,
) -> NeighborsManifest:
    """Writes the neighbours of tokens j m ... of a text, for each whole chunk j of m tokens. Collective. Killed, the
    same call continues.

    prefix: of the text, in or out of the database. seq_length: of the samples of training, a multiple of m; no
    neighbour is of a document that overlaps the chunk's sample. None: that overlaps the chunk.
    num_neighbors_query: of so many that are found, num_neighbors are kept; -1 where there are fewer.

    Raises ConfigError for an embedder that is not the index's and numbers that cannot be, DataError for an index that
    is damaged or of another database.
    """
    database, index = open_database(project), read_index(project)
    # Every rank makes all checks on the same files, so that all raise or none does.
    require_of_index(index, database, embedder)
    search = open_search(project, search_parameters)
    text, chunk_length = open_text(prefix, database), database.manifest.job.chunk_length
    job = NeighborsJob(
        text=Text(fingerprint=text.source.fingerprint(), documents=len(text.ends)),
        database=index.job.database,
        index=str(index.fingerprint),
        chunk_length=chunk_length,
        exclude_sequence_length=seq_length,
        num_neighbors=num_neighbors,
        num_neighbors_query=num_neighbors_query,
        search_parameters=search_parameters,
        block_rows=block_rows,
        count=len(text) // chunk_length,
    )
    require_numbers(seq_length, chunk_length, num_neighbors, num_neighbors_query)
    folder = neighbors_folder(project, prefix, job.text.fingerprint)
    if is_writer():
        with writing(project, "PROJECT"):
            _begin(folder, NeighborsManifest(job=job, prefix=str(Path(prefix).absolute())))
    wait_for_all()
    # All ranks decide the same: the array is written after the collective writing of blocks, for which the first rank
    # has to wait for the others.
    if not is_unchanged(folder, read_record(folder / MANIFEST, NeighborsManifest).neighbors):
        with bars(f"finding neighbours of {Path(prefix).name}") as update:
            _write(folder, NeighborQuery(database, text, embedder, search, job), update)
    wait_for_all()
    return read_neighbors(folder)


@dataclass(frozen=True)
class NeighborQuery:
    """Finds the neighbours of chunks of a text."""

    database: ChunkDatabase
    text: TokenStream
    embedder: ChunkEmbedder
    search: Search
    job: NeighborsJob

    def neighbors(self, chunks: range, on_rows: Callable[[int], None]) -> NDArray[np.int64]:
        """[chunks, num_neighbors]"""
        length = self.job.chunk_length
        # [chunks, m]: chunks follow one another in the text without gaps, across documents.
        tokens = self.text.read(chunks.start * length, len(chunks) * length).reshape(len(chunks), length)
        vectors = self.embedder.vectors(
            list(tokens), lambda count: on_rows(count // 2)
        )  # The search is the other half.
        excluded = own_documents(self.text, chunks, length, self.job.exclude_sequence_length or length)
        parts = []
        # SLICE x num_neighbors_query rows of the table are in memory at a time.
        for start in range(0, len(chunks), SLICE):
            part = slice(start, start + SLICE)
            nearest = self.search(vectors[part], min(self.job.num_neighbors_query, len(self.database))).rows
            parts.append(first_allowed(nearest, self._is_own(nearest, excluded[part]), self.job.num_neighbors))
            on_rows((len(chunks) + start + len(parts[-1])) // 2)
        return np.concatenate(parts)

    def _is_own(self, nearest: NDArray[np.int64], excluded: NDArray[np.int64]) -> NDArray[np.bool_]:
        """nearest [n, k]: chunks of the database -> whether each is of one of the text's documents excluded [n, 2]."""
        # [n, k, 4]: text, document, first token, tokens. -1 (nothing found) reads row 0, and is left out later.
        rows = self.database.rows[:][np.maximum(nearest, 0)].astype(np.int64)
        # The text's number in the database, by its fingerprint; None for a text that is not in it, whose chunks have no
        # document of their own there.
        number = self.database.number_of(self.job.text.fingerprint)
        documents = rows[..., 1]
        within = (excluded[:, :1] <= documents) & (documents <= excluded[:, 1:])
        return within & (rows[..., 0] == (-1 if number is None else number))


def open_text(prefix: str, database: ChunkDatabase) -> TokenStream:
    """Raises DataError for a text that records another tokenizer than the database's."""
    source = IndexedDataset(prefix, verify_checksums=True)
    manifest, expected = source.manifest(), database.manifest.job.tokenizer
    fingerprint = str(((manifest and manifest.tokenizer) or {}).get("fingerprint", expected))
    if fingerprint != expected:
        raise DataError(
            f"{prefix} was made with the tokenizer {fingerprint[:16]}..., and {database.name} with {expected[:16]}...; "
            "make the text with the tokenizer of the database"
        )
    return TokenStream(source, prefix)


def own_documents(text: TokenStream, chunks: range, chunk_length: int, sample_length: int) -> NDArray[np.int64]:
    """[chunks, 2]: the first and the last document that overlap the sample of each chunk."""
    # Example, chunks of 64 tokens and samples of 256: chunks 4 ... 7 are of sample 1, tokens 256 ... 511, and exclude
    # every document that has one of these.
    samples = np.arange(chunks.start, chunks.stop, dtype=np.int64) * chunk_length // sample_length
    # The last sample may be cut off by the end of the text.
    ends = np.minimum((samples + 1) * sample_length, len(text)) - 1
    return np.stack([text.sequences_at(samples * sample_length), text.sequences_at(ends)], axis=1)


def first_allowed(nearest: NDArray[np.int64], is_own: NDArray[np.bool_], count: int) -> NDArray[np.int64]:
    """[n, k] chunks, the nearest first -> [n, count]: those that are not own, in their order; then -1."""
    left_out = is_own | (nearest < 0)
    # A stable sort of booleans: allowed ones move to the front in their order.
    order = np.argsort(left_out, axis=1, kind="stable")[:, :count]
    kept = np.where(np.take_along_axis(left_out, order, 1), -1, np.take_along_axis(nearest, order, 1))
    # Fewer were searched than are kept, in a small database.
    return np.pad(kept, ((0, 0), (0, count - kept.shape[1])), constant_values=-1).astype(np.int64)


def require_numbers(seq_length: int | None, chunk_length: int, num_neighbors: int, num_neighbors_query: int) -> None:
    """Raises ConfigError for numbers that do not go together."""
    if seq_length is not None and seq_length % chunk_length:
        raise ConfigError(
            f"--seq-length {seq_length} is not a multiple of the database's chunks of {chunk_length} tokens; samples "
            "are cut into whole chunks"
        )
    if num_neighbors_query < num_neighbors:
        raise ConfigError(
            f"--num-neighbors-query {num_neighbors_query} is fewer than --num-neighbors {num_neighbors}; find at least "
            "as many as are kept"
        )


def _begin(folder: Path, manifest: NeighborsManifest) -> None:
    """Make the folder, or check that what is in it belongs to the same job, whose text may have moved."""
    path = folder / MANIFEST
    if path.exists():
        stored = read_record(path, NeighborsManifest)
        require_same_job(folder, stored.job, manifest.job)
        # What is complete stays recorded; only the place of the text is new.
        manifest = stored.model_copy(update={"prefix": manifest.prefix})
    write_record(path, manifest)


def _write(folder: Path, query: NeighborQuery, on_progress: OnProgress) -> None:
    blocks = Blocks(folder, "neighbors", "run mt retro query again")
    rows = ranges(query.job.count, query.job.block_rows)

    def compute(number: int, on_rows: Callable[[int], None]) -> NDArray[np.int64]:
        return query.neighbors(rows[number], on_rows)

    write_blocks(blocks, list(map(len, rows)), range(len(rows)), compute, query.embedder.share, on_progress)
    if is_writer():
        _join(folder, blocks)


def _join(folder: Path, blocks: Blocks) -> None:
    """One array of all blocks, which are removed."""
    manifest = read_record(folder / MANIFEST, NeighborsManifest)
    temporary, shape = folder / f".{NEIGHBORS}", (manifest.job.count, manifest.job.num_neighbors)
    # On the disk, block by block: the array of a large text does not fit into memory.
    joined = np.lib.format.open_memmap(temporary, "w+", np.int64, shape)
    parts = ranges(manifest.job.count, manifest.job.block_rows)
    for number, rows in enumerate(parts):
        joined[rows.start : rows.stop] = blocks.read(number)
    joined.flush()
    # Array, record, and then the blocks are removed: whenever the process is killed, there are blocks to join again or
    # a complete array.
    temporary.replace(folder / NEIGHBORS)
    stored = blocked_file(folder / NEIGHBORS)
    write_record(folder / MANIFEST, manifest.model_copy(update={"neighbors": stored}))
    blocks.remove(len(parts))
