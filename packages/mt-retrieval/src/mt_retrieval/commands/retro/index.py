"""`mt retro index`."""

from __future__ import annotations

import typer

from mt_infer.commands.layout import NPROC, SETTINGS, engine_settings, layout_of_ranks
from mt_retrieval.commands.options import DEVICE
from mt_retrieval.commands.retro.options import (
    BATCH_SIZE,
    BLOCK_ROWS,
    EMBEDDER,
    INDEX,
    PROJECT,
    SAME_EMBEDDER,
    TRAIN_ROWS,
    bars,
    embedder_of_index,
    ranks,
    say,
)
from mt_retrieval.retro import options as defaults


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
        from mt_retrieval.retro.embedder import open_embedder
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
