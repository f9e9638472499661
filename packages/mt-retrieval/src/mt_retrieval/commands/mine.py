"""`mt retrieve mine`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mt_core.commands import need
from mt_retrieval.commands.options import CHECKPOINT, DEVICE, EVIDENCE, INDEX, SEARCH_PARAMETERS, progress_bar


def mine(
    index: INDEX,
    questions: Annotated[Path, typer.Argument(metavar="QUESTIONS", help="Training questions, in DPR's JSON format.")],
    output: Annotated[Path, typer.Option(help="The same questions with mined hard negatives, to train on.")],
    negatives: Annotated[int, typer.Option(min=1, help="Hard negatives of each question.")] = 30,
    checkpoint: CHECKPOINT = None,
    evidence: EVIDENCE = None,
    search_parameters: SEARCH_PARAMETERS = None,
    device: DEVICE = "auto",
) -> None:
    """Find hard negatives: passages with high scores that do not have an answer."""
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt retrieve mine")
    from mt_retrieval.mining import mine_negatives
    from mt_retrieval.retriever import Retriever

    retriever = Retriever.open(
        index, checkpoint=checkpoint, evidence=evidence, device=device, search_parameters=search_parameters
    )
    with progress_bar("searching") as update:
        count = mine_negatives(retriever, questions, output, negatives, update)
    typer.echo(f"{output}: {count:,} hard negatives")
