"""`mt eval contamination`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mt_core.paths import as_path, write_whole
from mt_data.commands.corpus_options import InputFormat, OnError, TextKey, Workers, progress, run_options

SHOWN = 10
"""Samples that are printed; all are in the result file."""


def contamination(
    task: Annotated[Path, typer.Argument(parser=as_path, metavar="TASKFILE", help="JSON lines or Parquet.")],
    train: Annotated[list[str], typer.Option(help="Training files or quoted globs. Repeatable.", show_default=False)],
    output: Annotated[Path, typer.Option(help="Result file (JSON), which lists the samples.", metavar="FILE")],
    eval_keys: Annotated[
        list[str],
        typer.Option(help="Key of the task's records with text to search for. Repeatable.", show_default=False),
    ],
    ngram: Annotated[int, typer.Option(help="Words of the n-grams.")] = 13,
    min_ngram: Annotated[int, typer.Option(help="Shorter texts of at least so many words count as one n-gram.")] = 8,
    max_documents: Annotated[
        int, typer.Option(help="Ignore n-grams in more training documents than this, as common phrases; 0: no limit.")
    ] = 10,
    text_key: TextKey = "text",
    input_format: InputFormat = "auto",
    on_error: OnError = "raise",
    workers: Workers = 1,
) -> None:
    """Which samples of a task are in a training set, by shared n-grams."""
    from mt_data.corpora.overlap_options import OverlapOptions
    from mt_eval.contamination import find_contamination

    options = OverlapOptions(ngram=ngram, min_ngram=min_ngram, max_documents=max_documents or None)
    work = output.with_suffix(".work")
    with progress("contamination") as advance:
        run = run_options(work, None, None, text_key, input_format, on_error, workers, True, None, advance)
        found = find_contamination(task, eval_keys, train, options, run).to_dict()
    settings = {"ngram": ngram, "min_ngram": min_ngram, "max_documents": max_documents, "eval_keys": eval_keys}
    content = {"task": str(task), "train": train, **settings, **found}
    write_whole(output, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
    show(found)


def show(found: dict[str, object]) -> None:
    overlaps = found["overlaps"]
    assert isinstance(overlaps, list)
    typer.echo(
        f"{found['contaminated']:,} of {found['samples']:,} samples share n-grams with the training set; "
        f"{found['too_short']:,} are too short to be searched for"
    )
    _print_table(overlaps, "first shared words")
    common = found["ignored_as_common"]
    assert isinstance(common, dict)
    if common["ngrams"]:
        typer.echo(
            f"{common['ngrams']:,} n-grams of {common['samples']:,} samples are in more training documents than "
            "--max-documents, and were ignored as common phrases:"
        )
        _print_table(common["overlaps"], "first ignored words")
    typer.echo(f"words were compared in {found['normalization']}")


def _print_table(overlaps: list[dict[str, Any]], words: str) -> None:
    table = Table("sample", "share", words, box=None)
    for one in overlaps[:SHOWN]:
        table.add_row(one["name"], f"{one['share']:.0%}", one["words"])
    if overlaps:
        Console().print(table)
