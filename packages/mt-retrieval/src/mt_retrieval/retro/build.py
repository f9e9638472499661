"""All steps of a Retro project, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mt_data.datasets.retro.project import NeighborsManifest
from mt_data.indexed.dataset import IndexedDataset
from mt_retrieval.retro.blocks import (
    BATCH_SIZE,
    CHUNK_LENGTH,
    EXACT,
    NUM_NEIGHBORS,
    NUM_NEIGHBORS_QUERY,
    ROWS_OF_BLOCK,
    Bars,
    no_bars,
)
from mt_retrieval.retro.database import build_database, tokenizer_of
from mt_retrieval.retro.embeddings import open_embedder
from mt_retrieval.retro.index import add_to_index, require_index, train_index
from mt_retrieval.retro.query import find_neighbors, require_numbers


def build_project(
    project: str | Path,
    prefixes: Sequence[str],
    embedder: str,
    *,
    texts: Sequence[str] | None = None,
    seq_length: int | None,
    index: str = EXACT,
    train_rows: int | None = None,
    num_neighbors: int = NUM_NEIGHBORS,
    num_neighbors_query: int = NUM_NEIGHBORS_QUERY,
    search_parameters: str | None = None,
    batch_size: int = BATCH_SIZE,
    block_rows: int = ROWS_OF_BLOCK,
    device: str = "auto",
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    database: Mapping[str, Any] = MappingProxyType({}),
    bars: Bars = no_bars,
) -> list[NeighborsManifest]:
    """The database of indexed datasets, its index, and the neighbours of every chunk of `texts`, by
    default the same, for data.retro_project_dir. Collective. Killed, the same call continues.

    embedder: "hashed-ngrams", or a run directory or checkpoint of a BERT or a biencoder. database: further arguments
    of `build_database`. The others are those of `open_embedder`, `train_index` and `find_neighbors`, which name the
    errors.
    """
    folder = Path(project)
    # What can be refused is refused before documents are cut.
    require_numbers(seq_length, database.get("chunk_length", CHUNK_LENGTH), num_neighbors, num_neighbors_query)
    cut = [IndexedDataset(prefix) for prefix in prefixes]
    tokenizer, _ = tokenizer_of(cut, database.get("tokenizer_type"), database.get("tokenizer_entries", {}))
    opened = open_embedder(embedder, tokenizer, batch_size=batch_size, device=device, settings=settings)
    require_index(index, opened, search_parameters)
    build_database(folder, prefixes, **database, bars=bars)
    train_index(folder, opened, factory=index, train_rows=train_rows, block_rows=block_rows, bars=bars)
    add_to_index(folder, opened, bars=bars)
    return [
        find_neighbors(
            folder,
            prefix,
            opened,
            seq_length=seq_length,
            num_neighbors=num_neighbors,
            num_neighbors_query=num_neighbors_query,
            search_parameters=search_parameters,
            block_rows=block_rows,
            bars=bars,
        )
        for prefix in texts or prefixes
    ]
