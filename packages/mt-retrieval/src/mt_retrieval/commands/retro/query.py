"""`mt retro query`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from mt_infer.commands.layout import NPROC, SETTINGS
from mt_retrieval.commands.options import DEVICE, SEARCH_PARAMETERS
from mt_retrieval.commands.retro.options import (
    BLOCK_ROWS,
    EXCLUDE,
    NUM_NEIGHBORS,
    NUM_NEIGHBORS_QUERY,
    PROJECT,
    SAME_EMBEDDER,
    SEQ_LENGTH,
    TEXT,
    bars,
    embedder_of_index,
    excluded_length,
    ranks,
    say,
)
from mt_retrieval.retro import options as defaults

if TYPE_CHECKING:
    from mt_data.datasets.retro.project import NeighborsManifest


def query(
    context: typer.Context,
    project: PROJECT,
    text: TEXT = None,
    seq_length: SEQ_LENGTH = None,
    exclude: EXCLUDE = "sample",
    num_neighbors: NUM_NEIGHBORS = defaults.NUM_NEIGHBORS,
    num_neighbors_query: NUM_NEIGHBORS_QUERY = defaults.NUM_NEIGHBORS_QUERY,
    search_parameters: SEARCH_PARAMETERS = None,
    block_rows: BLOCK_ROWS = defaults.ROWS_OF_BLOCK,
    embedder: SAME_EMBEDDER = None,
    set_: SETTINGS = None,
    device: DEVICE = "auto",
    nproc: NPROC = None,
) -> None:
    """Find the neighbours of every chunk of the texts that training reads."""
    length = excluded_length(exclude, seq_length)
    with ranks(context, "mt retro query", device, nproc):
        from mt_data.datasets.retro.project import database_folder, read_database
        from mt_retrieval.retro.query import find_neighbors

        opened = embedder_of_index(project, embedder, device, set_)
        for prefix in text or read_database(database_folder(project)).prefixes:
            manifest = find_neighbors(
                project,
                prefix,
                opened,
                seq_length=length,
                num_neighbors=num_neighbors,
                num_neighbors_query=num_neighbors_query,
                search_parameters=search_parameters,
                block_rows=block_rows,
                bars=bars,
            )
            say(summary(manifest))


def summary(manifest: NeighborsManifest) -> str:
    return f"neighbours of {manifest.prefix}: {manifest.job.count:,} chunks with up to {manifest.job.num_neighbors}"
