"""`mt retro`: chunk database, index and neighbours of a Retro project."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mt_infer.commands.layout import NPROC, SETTINGS, engine_settings, layout_of_ranks
from mt_retrieval.commands.options import DEVICE, SEARCH_PARAMETERS
from mt_retrieval.commands.retro_options import (
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
    SAME_EMBEDDER,
    SEQ_LENGTH,
    SPLIT,
    TEXT,
    TOKENIZER,
    TOKENIZER_TYPE,
    TRAIN_ROWS,
    bars,
    database_options,
    embedder_of_index,
    excluded_length,
    ranks,
    say,
)
from mt_retrieval.retro import blocks as defaults

if TYPE_CHECKING:
    from mt_data.datasets.retro.project import DatabaseManifest, NeighborsManifest


# -- query -------------------------------------------------------------------------------------------


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
            say(neighbors_summary(manifest))


def neighbors_summary(manifest: NeighborsManifest) -> str:
    return f"neighbours of {manifest.prefix}: {manifest.job.count:,} chunks with up to {manifest.job.num_neighbors}"


# -- db ----------------------------------------------------------------------------------------------


def db_build(
    context: typer.Context,
    project: PROJECT,
    data_path: DATA_PATH,
    split: SPLIT = defaults.SPLIT,
    chunk_length: CHUNK_LENGTH = defaults.CHUNK_LENGTH,
    deduplicate: DEDUPLICATE = False,
    tokenizer_type: TOKENIZER_TYPE = None,
    tokenizer: TOKENIZER = None,
    nproc: NPROC = None,
) -> None:
    """Cut documents into chunks, and choose those that are searched."""
    with ranks(context, "mt retro db db_build", "cpu", nproc):
        from mt_retrieval.retro.database import build_database

        options = database_options(split, chunk_length, deduplicate, tokenizer_type, tokenizer)
        say(database_summary(build_database(project, data_path, **options, bars=bars)))


def database_summary(manifest: DatabaseManifest) -> str:
    counts = manifest.counts
    assert counts is not None
    return (
        f"database: {counts.kept:,} chunks of {counts.cut:,}; {counts.held_out:,} of validation and test, "
        f"{counts.also_held_out:,} with the content of one of these, {counts.duplicates:,} duplicates and "
        f"{counts.blank:,} blank ones are left out"
    )


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
        say(database_summary(read_database(database_folder(project))))
        for manifest in built:
            say(neighbors_summary(manifest))


# -- index -------------------------------------------------------------------------------------------


def train(
    context: typer.Context,
    project: PROJECT,
    embedder: EMBEDDER,
    index: INDEX = defaults.EXACT,
    train_rows: TRAIN_ROWS = None,
    batch_size: BATCH_SIZE = defaults.BATCH_SIZE,
    block_rows: BLOCK_ROWS = defaults.ROWS_OF_BLOCK,
    set_: SETTINGS = None,
    device: DEVICE = "auto",
    nproc: NPROC = None,
) -> None:
    """Embed chunks of the database and train an empty index on them."""
    with ranks(context, "mt retro index train", device, nproc):
        from mt_retrieval.retro.database import database_tokenizer
        from mt_retrieval.retro.embeddings import open_embedder
        from mt_retrieval.retro.index import train_index

        settings = layout_of_ranks(engine_settings(set_ or []))
        tokenizer = database_tokenizer(project)
        opened = open_embedder(embedder, tokenizer, batch_size=batch_size, device=device, settings=settings)
        train_index(project, opened, factory=index, train_rows=train_rows, block_rows=block_rows, bars=bars)
        say(f"index {index}: " + ("needs no training" if index == defaults.EXACT else "trained"))


def add(
    context: typer.Context,
    project: PROJECT,
    embedder: SAME_EMBEDDER = None,
    set_: SETTINGS = None,
    device: DEVICE = "auto",
    nproc: NPROC = None,
) -> None:
    """Embed the other chunks and add all of them to the index."""
    with ranks(context, "mt retro index add", device, nproc):
        from mt_retrieval.retro.embeddings import ChunkEmbeddings
        from mt_retrieval.retro.index import add_to_index

        manifest = add_to_index(project, embedder_of_index(project, embedder, device, set_), bars=bars)
        say(f"index {manifest.job.factory}: {ChunkEmbeddings(project).manifest.job.count:,} chunks")


# -- verify ------------------------------------------------------------------------------------------


def verify(
    context: typer.Context,
    project: PROJECT,
    fraction: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the blocks, drawn at random, that are computed again.")
    ] = 0.0,
    embedder: SAME_EMBEDDER = None,
    device: DEVICE = "auto",
) -> None:
    """Compare all files with their hashes and with each other, and blocks with what is computed now."""
    with ranks(context, "mt retro verify", device, None):
        from mt_retrieval.retro.verify import verify_project

        for line in verify_project(project, fraction=fraction, embedder=embedder, device=device, bars=bars):
            say(line)


# -- the app -----------------------------------------------------------------------------------------

app = typer.Typer(no_args_is_help=True, help="Chunk database, index and neighbours of a Retro project.")
db_app = typer.Typer(no_args_is_help=True, help="The chunk database.")
index_app = typer.Typer(no_args_is_help=True, help="The index of its chunks.")

db_app.command("build")(db_build)
index_app.command("train")(train)
index_app.command("add")(add)
app.add_typer(db_app, name="db")
app.add_typer(index_app, name="index")
app.command("query")(query)
app.command("build")(build)
app.command("verify")(verify)
