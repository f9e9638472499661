"""`mt retrieve search`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from mt_core.commands import need
from mt_retrieval.commands.options import CHECKPOINT, DEVICE, EVIDENCE, INDEX, SEARCH_PARAMETERS


def search(
    index: INDEX,
    questions: Annotated[list[str], typer.Argument(metavar="QUESTION...")],
    top_k: Annotated[int, typer.Option(min=1, help="Passages of each question.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON for each question.")] = False,
    checkpoint: CHECKPOINT = None,
    evidence: EVIDENCE = None,
    search_parameters: SEARCH_PARAMETERS = None,
    device: DEVICE = "auto",
) -> None:
    """Show the passages with the highest scores."""
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt retrieve search")
    from mt_retrieval.retriever import Retriever

    retriever = Retriever.open(
        index, checkpoint=checkpoint, evidence=evidence, device=device, search_parameters=search_parameters
    )
    for question, found in zip(questions, retriever.search(questions, top_k), strict=True):
        if as_json:
            record = {"question": question, "passages": [passage.as_record() for passage in found]}
            typer.echo(json.dumps(record, ensure_ascii=False))
            continue
        typer.echo(question)
        for scored in found:
            typer.echo(f"  {scored.score:8.3f}  [{scored.passage.id}] {scored.passage.title}: {scored.passage.text}")
