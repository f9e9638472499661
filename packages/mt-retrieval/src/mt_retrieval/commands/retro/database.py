"""`mt retro db build`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from mt_infer.commands.layout import NPROC
from mt_retrieval.commands.retro.options import (
    CHUNK_LENGTH,
    DATA_PATH,
    DEDUPLICATE,
    PROJECT,
    SPLIT,
    TOKENIZER,
    TOKENIZER_TYPE,
    bars,
    database_options,
    ranks,
    say,
)
from mt_retrieval.retro import options as defaults

if TYPE_CHECKING:
    from mt_data.datasets.retro.project import DatabaseManifest


def build(
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
    with ranks(context, "mt retro db build", "cpu", nproc):
        from mt_retrieval.retro.database import build_database

        options = database_options(split, chunk_length, deduplicate, tokenizer_type, tokenizer)
        say(summary(build_database(project, data_path, **options, bars=bars)))


def summary(manifest: DatabaseManifest) -> str:
    counts = manifest.counts
    assert counts is not None
    return (
        f"database: {counts.kept:,} chunks of {counts.cut:,}; {counts.held_out:,} of validation and test, "
        f"{counts.also_held_out:,} with the content of one of these, {counts.duplicates:,} duplicates and "
        f"{counts.blank:,} blank ones are left out"
    )
