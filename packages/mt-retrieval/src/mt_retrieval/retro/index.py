"""The index of the database's embeddings: PROJECT/index, of faiss; or their exact search by NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from mt_core.errors import ConfigError, DataError
from mt_core.parallel.context import is_writer, wait_for_all
from mt_core.paths import writing
from mt_data.datasets.retro.database import ChunkDatabase
from mt_data.datasets.retro.project import MANIFEST
from mt_data.records import Origin, Record, StoredFile, is_unchanged, read_record, require_unchanged, write_record
from mt_retrieval.encoder import versions
from mt_retrieval.index import ExactL2Index, SearchResult, faiss, set_parameters, write_index
from mt_retrieval.retro.blocks import (
    EXACT,
    ROWS_OF_BLOCK,
    Bars,
    Blocks,
    OnProgress,
    Share,
    no_bars,
    require_same_job,
    write_blocks,
)
from mt_retrieval.retro.database import open_database
from mt_retrieval.retro.embeddings import ChunkEmbedder, ChunkEmbeddings, begin_embeddings

EMPTY, ADDED = "empty.faissindex", "added.faissindex"
CURE = "run mt retro index train and mt retro index add again"
INSTEAD = f"give --index {EXACT}"
Search = Callable[[NDArray[np.float32], int], SearchResult]
"""(questions [n, dim], k) -> the k nearest, the nearest first"""


class IndexJob(Record):
    """What the index depends on. factory: faiss's description, or "exact". train_rows: of the embeddings, on which it
    was trained; None: all."""

    database: str
    embedder: str
    factory: str
    train_rows: int | None


class IndexManifest(Record):
    """empty: trained, without chunks. added: with all of them. fingerprint: None until all are added."""

    format: Literal["mt-retro-index"] = "mt-retro-index"
    version: Literal[1] = 1
    job: IndexJob
    embedder: Origin
    empty: StoredFile | None = None
    added: StoredFile | None = None
    fingerprint: str | None = None
    made_with: dict[str, str] = Field(default_factory=dict)


def index_folder(project: Path) -> Path:
    return project / "index"


def read_index(project: Path) -> IndexManifest:
    """Raises DataError for a project whose index is not trained."""
    return read_record(index_folder(project) / MANIFEST, IndexManifest)


def train_index(
    project: Path,
    embedder: ChunkEmbedder,
    *,
    factory: str = EXACT,
    train_rows: int | None = None,
    block_rows: int = ROWS_OF_BLOCK,
    bars: Bars = no_bars,
) -> IndexManifest:
    """Embeds chunks and trains an empty index on them, by L2 distance; "exact" needs no training. Collective. Killed,
    the same call continues.

    train_rows: chunks to train on, in blocks evenly spread over the database; None: all.
    Raises ConfigError for a project with embeddings of another embedder or database, or another index, and for a
    description that faiss refuses.
    """
    database = open_database(project)
    job = IndexJob(
        database=database.manifest.fingerprint, embedder=embedder.fingerprint, factory=factory, train_rows=train_rows
    )
    if is_writer():
        if factory != EXACT:
            faiss(INSTEAD)
        with writing(project, "PROJECT"):
            begin_embeddings(project, database, embedder, block_rows)
            _begin(project, IndexManifest(job=job, embedder=Origin(sha256=embedder.fingerprint, path=embedder.name)))
    wait_for_all()
    if factory != EXACT:
        # Training needs a part of the embeddings only; these are kept, and `add` computes the others.
        chosen = _training_blocks(ChunkEmbeddings(project), train_rows)
        with bars("embedding chunks to train on") as update:
            ChunkEmbeddings(project).write(database, embedder, chosen, update)
        if is_writer():
            _train(project, chosen, bars)
    wait_for_all()
    return read_index(project)


def add_to_index(project: Path, embedder: ChunkEmbedder, *, bars: Bars = no_bars) -> IndexManifest:
    """Embeds the chunks that are not yet, and adds all of them to the trained index. Collective. Killed, the same call
    continues.

    Raises ConfigError for an embedder that is not the index's, DataError for an index that is not trained or damaged.
    """
    database, manifest = open_database(project), read_index(project)
    require_of_index(manifest, database, embedder)
    embeddings = ChunkEmbeddings(project)
    with bars("embedding chunks") as update:
        # Those that training wrote are there already.
        embeddings.write(database, embedder, range(len(embeddings.rows)), update)
    finished: dict[str, Any]
    if manifest.job.factory == EXACT:
        finished = {"fingerprint": embeddings.fingerprint()}
    else:
        added = _add(project, manifest, embeddings, embedder.share, bars)
        finished = {"added": added, "fingerprint": added.sha256 if added else None}
    if is_writer():
        # Last, after everything that the fingerprint stands for is on the disk.
        made_with = {"made_with": versions()}
        write_record(index_folder(project) / MANIFEST, read_index(project).model_copy(update=finished | made_with))
    wait_for_all()
    return read_index(project)


def open_search(project: Path, search_parameters: str | None) -> Search:
    """Raises DataError for an index that is not complete or damaged, ConfigError for parameters that it does not have.
    search_parameters: of faiss, such as nprobe=64."""
    manifest = read_index(project)
    if manifest.fingerprint is None:
        raise DataError(f"{index_folder(project)} has no chunks yet; run mt retro index add")
    if manifest.added is None:
        _require_exact(search_parameters)
        # added is None where faiss was not used.
        return ExactL2Index(ChunkEmbeddings(project).matrices()).search
    path = require_unchanged(index_folder(project), manifest.added, CURE)
    index = faiss(INSTEAD).read_index(str(path))
    if search_parameters is not None:
        set_parameters(index, search_parameters, manifest.job.factory)

    def search(questions: NDArray[np.float32], k: int) -> SearchResult:
        return SearchResult(*index.search(np.ascontiguousarray(questions, np.float32), k))

    return search


def require_index(factory: str, embedder: ChunkEmbedder, search_parameters: str | None) -> None:
    """Raises ConfigError for a description or search parameters that faiss refuses, before there are embeddings.
    Collective over the processes that share the embedder's model."""
    if factory == EXACT:
        _require_exact(search_parameters)
        return
    # One chunk of one token: the width is that of the vectors, which no embedder declares.
    _, width = embedder.vectors([np.zeros(1, np.int64)], lambda count: None).shape
    with _refusals(factory, f"embeddings of width {width}"):
        index = faiss(INSTEAD).index_factory(width, factory)
    if search_parameters is not None:
        set_parameters(index, search_parameters, factory)


def _require_exact(search_parameters: str | None) -> None:
    if search_parameters is not None:
        raise ConfigError("--search-parameters are those of an index of faiss; this one is searched exactly")


def require_of_index(manifest: IndexManifest, database: ChunkDatabase, embedder: ChunkEmbedder) -> None:
    """Raises ConfigError for another embedder, DataError for another database than those of the index, by hash."""
    if embedder.fingerprint != manifest.job.embedder:
        raise ConfigError(
            f"the index is of another embedder: SHA-256 {manifest.job.embedder[:16]}... ({manifest.embedder.path}), "
            f"and {embedder.name} has {embedder.fingerprint[:16]}...; give the first one with --embedder, or remove "
            "the folders embeddings and index and train another index"
        )
    if database.manifest.fingerprint != manifest.job.database:
        raise DataError(
            f"the index is of another database: {manifest.job.database[:16]}..., and {database.name} is "
            f"{database.manifest.fingerprint[:16]}...; remove the folders embeddings and index and train another index"
        )


def _begin(project: Path, manifest: IndexManifest) -> None:
    """Make the folder, or check that an index in it belongs to the same job, whose embedder may have moved."""
    path = index_folder(project) / MANIFEST
    stored = read_record(path, IndexManifest) if path.exists() else None
    # An index without a file may become another one.
    if stored is not None and (stored.empty or stored.fingerprint):
        require_same_job(path.parent, stored.job, manifest.job)
        manifest = stored.model_copy(update={"embedder": manifest.embedder})
    write_record(path, manifest)


def _training_blocks(embeddings: ChunkEmbeddings, train_rows: int | None) -> list[int]:
    """Blocks evenly spread, as many as have the rows."""
    count = len(embeddings.rows)
    needed = count if train_rows is None else min(count, -(-train_rows // embeddings.manifest.job.block_rows))
    # Example: 10 blocks, 3 needed -> 0, 3, 6.
    return [number * count // needed for number in range(needed)]


def _train(project: Path, chosen: list[int], bars: Bars) -> None:
    manifest, folder = read_index(project), index_folder(project)
    if is_unchanged(folder, manifest.empty):
        return
    blocks = [np.asarray(ChunkEmbeddings(project).files.read(number), np.float32) for number in chosen]
    # Whole blocks are embedded; the last one may have more rows than requested.
    vectors = np.concatenate(blocks)[: manifest.job.train_rows]
    with bars("training the index"):
        empty = write_index(_trained(vectors, manifest.job.factory), folder, EMPTY)
    changed = {"empty": empty, "added": None, "fingerprint": None, "made_with": versions()}
    write_record(folder / MANIFEST, manifest.model_copy(update=changed))


def _trained(vectors: NDArray[np.float32], factory: str) -> Any:
    library = faiss(INSTEAD)
    with _refusals(factory, f"{len(vectors)} embeddings of width {vectors.shape[1]}"):
        index = library.index_factory(vectors.shape[1], factory, library.METRIC_L2)
        index.train(vectors)
    return index


@contextmanager
def _refusals(factory: str, embeddings: str) -> Iterator[None]:
    """Raises ConfigError for what faiss refuses. embeddings: in words."""
    try:
        yield
    except RuntimeError as error:
        # faiss's messages are "Error in FUNCTION at FILE:LINE: Error: 'CONDITION' failed: REASON".
        reason = str(error).splitlines()[-1].rpartition("failed: ")[2]
        raise ConfigError(
            f"faiss cannot make the index {factory} of {embeddings}: {reason}; choose another --index, or other "
            "--train-rows"
        ) from error


def _add(
    project: Path, manifest: IndexManifest, embeddings: ChunkEmbeddings, share: Share, bars: Bars
) -> StoredFile | None:
    """Writes the index with all chunks; the first rank returns it. The ranks share the encoding for an inverted file,
    where it costs the most; the codes are removed once they are added."""
    folder = index_folder(project)
    if manifest.empty is None:
        raise DataError(f"{folder} is not trained; run mt retro index train")
    if is_unchanged(folder, manifest.added):
        return manifest.added
    index = faiss(INSTEAD).read_index(str(require_unchanged(folder, manifest.empty, CURE)))
    # None for an index without inverted lists: one process adds its vectors.
    inverted = faiss().try_extract_index_ivf(index)
    codes = Blocks(folder, "codes", CURE)
    if inverted is not None:
        with bars("encoding chunks") as update:
            _encode(index, embeddings, codes, share, update)
    # Adding is serial: the file is one, and encoding, which is shared, is most of the work.
    if not is_writer():
        return None
    with bars("adding chunks") as update:
        for number, rows in enumerate(embeddings.rows):
            if inverted is None:
                index.add(np.asarray(embeddings.files.read(number), np.float32))
            else:
                # Ids are the rows of the chunks, whatever the order of the lists.
                inverted.add_sa_codes(np.array(codes.read(number)), np.arange(rows.start, rows.stop))
                # A transform in front of the lists (OPQ) counts by itself, and its own add was not called.
                index.ntotal = inverted.ntotal
            update(rows.stop, embeddings.manifest.job.count)
        added = write_index(index, folder, ADDED)
    codes.remove(len(embeddings.rows))
    return added


def _encode(index: Any, embeddings: ChunkEmbeddings, codes: Blocks, share: Share, on_progress: OnProgress) -> None:
    def compute(number: int, on_rows: Callable[[int], None]) -> NDArray[np.uint8]:
        encoded: NDArray[np.uint8] = index.sa_encode(np.asarray(embeddings.files.read(number), np.float32))
        return encoded

    counts = list(map(len, embeddings.rows))
    write_blocks(codes, counts, range(len(counts)), compute, share, on_progress)
