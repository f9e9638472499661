"""The full check of a Retro project: every file by its hash, and a share of the blocks computed again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import SystemRandom

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError, Problems
from mt_core.interfaces import Tokenizer
from mt_data.datasets.retro.database import ChunkDatabase
from mt_data.datasets.retro.project import MANIFEST, database_folder, read_neighbors
from mt_data.records import require_unchanged
from mt_retrieval.retro.blocks import Bars, Blocks, no_bars, ranges
from mt_retrieval.retro.database import ChunkCutter, DatabaseBlocks, database_tokenizer, open_database
from mt_retrieval.retro.embeddings import ChunkEmbedder, ChunkEmbeddings, recorded_embedder
from mt_retrieval.retro.index import CURE, EXACT, index_folder, open_search, read_index, require_of_index
from mt_retrieval.retro.query import NeighborQuery, open_text

Check = Callable[[], object]
"""Raises DataError or ConfigError for what is wrong."""
Array = NDArray[np.generic]


def verify_project(
    project: Path,
    *,
    fraction: float = 0.0,
    embedder: str | None = None,
    device: str = "auto",
    bars: Bars = no_bars,
) -> list[str]:
    """Compares every file of the project with its hash, texts, database, index and neighbours with each other, and a
    random `fraction` of the blocks of chunks, embeddings and neighbours, computed again, bit for bit.

    embedder: where the index's encoder is now, if it has moved. Returns a line for each part. Raises DataError with
    all problems.
    """
    tokenizer = database_tokenizer(project)
    opened = recorded_embedder(project, tokenizer, name=embedder, device=device)
    # Checks are functions, made first and called below: the bar has their number, and all problems are collected in
    # place of the first.
    database = open_database(project)
    parts = {
        "database": list(_database_checks(project, database, tokenizer, fraction)),
        "embeddings": list(_embedding_checks(project, database, opened, fraction)),
        "index": list(_index_checks(project, database, opened)),
    }
    for folder in sorted(path.parent for path in project.glob(f"query/*/{MANIFEST}")):
        parts[f"neighbours of {folder.name}"] = list(_neighbor_checks(project, folder, database, opened, fraction))
    problems, total = Problems(), sum(map(len, parts.values()))
    with bars("verifying") as update:
        for done, check in enumerate(check for checks in parts.values() for check in checks):
            update(done, total)
            with problems.collect():
                check()
    problems.stop_if_any()
    return [f"{name}: {len(checks)} checks passed" for name, checks in parts.items()]


def _database_checks(project: Path, database: ChunkDatabase, tokenizer: Tokenizer, fraction: float) -> Iterator[Check]:
    folder, manifest = database_folder(project), database.manifest
    blocks = DatabaseBlocks.of(folder, manifest.job)
    cutter = ChunkCutter(tokenizer, manifest.job.chunk_length)
    assert manifest.chunks is not None
    # The table that training reads; then the blocks that it was merged from.
    yield partial(require_unchanged, folder, manifest.chunks, blocks.files.cure)
    yield from _of_blocks(
        blocks.files,
        len(blocks.parts),
        fraction,
        lambda number: blocks.cut(cutter, database.texts, number, lambda count: None),
    )


def _embedding_checks(
    project: Path, database: ChunkDatabase, embedder: ChunkEmbedder, fraction: float
) -> Iterator[Check]:
    embeddings = ChunkEmbeddings(project)
    yield from _of_blocks(
        embeddings.files,
        len(embeddings.rows),
        fraction,
        lambda number: embeddings.compute(database, embedder, number, lambda count: None),
    )


def _index_checks(project: Path, database: ChunkDatabase, embedder: ChunkEmbedder) -> Iterator[Check]:
    index, folder = read_index(project), index_folder(project)
    yield partial(require_of_index, index, database, embedder)
    yield from (partial(require_unchanged, folder, file, CURE) for file in (index.empty, index.added) if file)
    if index.job.factory == EXACT:
        # Without faiss the index is the embeddings: its fingerprint is that of their blocks.
        yield lambda: _require_fingerprint("the embeddings", ChunkEmbeddings(project).fingerprint(), index.fingerprint)


def _neighbor_checks(
    project: Path, folder: Path, database: ChunkDatabase, embedder: ChunkEmbedder, fraction: float
) -> Iterator[Check]:
    manifest, index = read_neighbors(folder), read_index(project)
    job, stored, text = manifest.job, manifest.neighbors, open_text(manifest.prefix, database)
    assert stored is not None
    yield partial(_require_fingerprint, manifest.prefix, text.source.fingerprint(), job.text.fingerprint)
    yield partial(_require_fingerprint, database.name, database.manifest.fingerprint, job.database)
    yield partial(_require_fingerprint, "the index", index.fingerprint, job.index)
    yield partial(require_unchanged, folder, stored, "remove the folder and run mt retro query again")
    # Neighbours have been joined to one array: blocks are ranges of its rows.
    rows = ranges(job.count, job.block_rows)
    if not (drawn := _drawn(len(rows), fraction)):
        return
    query = NeighborQuery(database, text, embedder, open_search(project, job.search_parameters), job)
    array = np.lib.format.open_memmap(folder / stored.name, mode="r")
    for number in drawn:
        part = slice(rows[number].start, rows[number].stop)
        what = f"{folder}, block {number} of neighbours"
        yield partial(_require_equal, what, array[part], partial(query.neighbors, rows[number], lambda count: None))


def _of_blocks(files: Blocks, count: int, fraction: float, compute: Callable[[int], Array]) -> Iterator[Check]:
    yield from (partial(files.read, number) for number in range(count))
    for number in _drawn(count, fraction):
        what = f"{files.folder}, block {number} of {files.name}"
        yield partial(_require_equal, what, files.read(number), partial(compute, number))


def _drawn(count: int, fraction: float) -> list[int]:
    # Others each time, not those of a seed: repeated runs cover more of the project.
    return sorted(SystemRandom().sample(range(count), math.ceil(fraction * count)))


def _require_fingerprint(what: str, fingerprint: str | None, recorded: str | None) -> None:
    if fingerprint != recorded:
        raise DataError(
            f"{what} has the fingerprint {str(fingerprint)[:16]}..., and what was made of it records "
            f"{str(recorded)[:16]}...; run the later steps of mt retro again in another project"
        )


def _require_equal(what: str, stored: Array, compute: Callable[[], Array]) -> None:
    computed = compute()
    # Bit for bit, which holds on the same kind of device with the same versions and batch size.
    if stored.dtype != computed.dtype or not np.array_equal(stored, computed):
        raise DataError(
            f"{what} is not what is computed now: it was changed together with its record, or made on another kind of "
            "device or with other versions"
        )
