"""`mt retro build`."""

from __future__ import annotations

import typer

from mt_infer.commands.layout import NPROC, SETTINGS, engine_settings, layout_of_ranks
from mt_retrieval.commands.options import DEVICE, SEARCH_PARAMETERS
from mt_retrieval.commands.retro import database, query
from mt_retrieval.commands.retro.options import (
    BATCH_SIZE,
    BLOCK_ROWS,
    CHUNK_LENGTH,
    DATA_PATH,
    DEDUPLICATE,
    EMBEDDER,
    EXCLUDE,
    INDEX,
    NUM_NEIGHBORS,
    NUM_NEIGHBORS_QUERY,
    PROJECT,
    SEQ_LENGTH,
    SPLIT,
    TEXT,
    TOKENIZER,
    TOKENIZER_TYPE,
    TRAIN_ROWS,
    bars,
    database_options,
    excluded_length,
    ranks,
    say,
)
from mt_retrieval.retro import options as defaults


def build(
    context: typer.Context,
    project: PROJECT,
    data_path: DATA_PATH,
    embedder: EMBEDDER,
    split: SPLIT = defaults.SPLIT,
    chunk_length: CHUNK_LENGTH = defaults.CHUNK_LENGTH,
    deduplicate: DEDUPLICATE = False,
    tokenizer_type: TOKENIZER_TYPE = None,
    tokenizer: TOKENIZER = None,
    index: INDEX = defaults.EXACT,
    train_rows: TRAIN_ROWS = None,
    text: TEXT = None,
    seq_length: SEQ_LENGTH = None,
    exclude: EXCLUDE = "sample",
    num_neighbors: NUM_NEIGHBORS = defaults.NUM_NEIGHBORS,
    num_neighbors_query: NUM_NEIGHBORS_QUERY = defaults.NUM_NEIGHBORS_QUERY,
    search_parameters: SEARCH_PARAMETERS = None,
    batch_size: BATCH_SIZE = defaults.BATCH_SIZE,
    block_rows: BLOCK_ROWS = defaults.ROWS_OF_BLOCK,
    set_: SETTINGS = None,
    device: DEVICE = "auto",
    nproc: NPROC = None,
) -> None:
    """All of it: db build, index train, index add and query."""
    length = excluded_length(exclude, seq_length)
    with ranks(context, "mt retro build", device, nproc):
        from mt_data.datasets.retro.project import database_folder, read_database
        from mt_retrieval.retro.build import build_project

        built = build_project(
            project,
            data_path,
            embedder,
            texts=text,
            seq_length=length,
            index=index,
            train_rows=train_rows,
            num_neighbors=num_neighbors,
            num_neighbors_query=num_neighbors_query,
            search_parameters=search_parameters,
            batch_size=batch_size,
            block_rows=block_rows,
            device=device,
            settings=layout_of_ranks(engine_settings(set_ or [])),
            database=database_options(split, chunk_length, deduplicate, tokenizer_type, tokenizer),
            bars=bars,
        )
        say(database.summary(read_database(database_folder(project))))
        for manifest in built:
            say(query.summary(manifest))
