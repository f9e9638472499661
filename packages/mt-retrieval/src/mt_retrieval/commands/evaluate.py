"""`mt retrieve evaluate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mt_core.commands import need
from mt_core.errors import ConfigError
from mt_core.paths import write_whole
from mt_retrieval.commands.options import CHECKPOINT, DEVICE, EVIDENCE, INDEX, SEARCH_PARAMETERS, progress_bar

if TYPE_CHECKING:
    from mt_retrieval.evaluation import Searcher


def evaluate(
    index: INDEX,
    questions: Annotated[
        Path,
        typer.Argument(metavar="QUESTIONS", help="A line each: question, tab, list of answers (Natural Questions)."),
    ],
    top_k: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable.", show_default="1 5 20 100")] = None,
    match: Annotated[
        Literal["string", "regex"], typer.Option(help="Whether answers are texts or regular expressions.")
    ] = "string",
    output: Annotated[
        Path | None, typer.Option(help="JSON file of the result and what it was computed with.", show_default=False)
    ] = None,
    question_embeddings: Annotated[
        Path | None,
        typer.Option(help="A .npy file with a row for each question, in place of the encoder.", show_default=False),
    ] = None,
    checkpoint: CHECKPOINT = None,
    evidence: EVIDENCE = None,
    search_parameters: SEARCH_PARAMETERS = None,
    device: DEVICE = "auto",
) -> None:
    """Measure recall: the share of questions with an answer in the first k passages."""
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt retrieve evaluate")
    if question_embeddings is not None and checkpoint is not None:
        raise ConfigError("--question-embeddings are in place of --checkpoint; give one of them")
    from mt_data.questions import read_questions
    from mt_retrieval.evaluation import measure_recall

    asked, wanted = read_questions(questions), sorted(set(top_k or (1, 5, 20, 100)))
    searcher = _opened(index, question_embeddings, checkpoint, evidence, search_parameters, device)
    with progress_bar("searching") as update:
        found = searcher.find(asked, wanted[-1], update)
    with progress_bar("matching") as update:
        recall = measure_recall(asked, found.rows, searcher.evidence, match, update)
    values = {str(k): recall.at(k) for k in wanted}
    for k, value in values.items():
        typer.echo(f"recall@{k:<4} {value:.4f}")
    if output is not None:
        result = {"recall": values, "questions": len(asked), "match": match, **searcher.origin(questions)}
        write_whole(output, (json.dumps(result, indent=1) + "\n").encode())


def _opened(
    index: Path,
    question_embeddings: Path | None,
    checkpoint: Path | None,
    evidence: str | None,
    search_parameters: str | None,
    device: str,
) -> Searcher:
    from mt_retrieval.evaluation import EmbeddedQuestions, EncodedQuestions
    from mt_retrieval.retriever import Retriever

    if question_embeddings is not None:
        return EmbeddedQuestions.open(index, question_embeddings, evidence, search_parameters)
    return EncodedQuestions(
        Retriever.open(
            index, checkpoint=checkpoint, evidence=evidence, device=device, search_parameters=search_parameters
        )
    )
