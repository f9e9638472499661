"""`mt eval compare` and `mt eval contamination`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mt_core.commands import need, with_fields
from mt_core.paths import as_path, write_whole
from mt_data.commands.corpus_options import ReadingOptions, TextKey, progress
from mt_data.corpora.options import NgramOptions
from mt_eval.commands.options import seed_option

if TYPE_CHECKING:
    from mt_eval.comparison import Difference


RESULTS = "A result file of mt eval, with its samples beside it."


def compare(
    first: Annotated[Path, typer.Argument(parser=as_path, metavar="A.json", help=RESULTS)],
    second: Annotated[Path, typer.Argument(parser=as_path, metavar="B.json", help=RESULTS)],
    resamples: Annotated[int, typer.Option(help="Sets of samples that are drawn.")] = 10_000,
    confidence: Annotated[float, typer.Option(help="Of the intervals.")] = 0.95,
    seed: Annotated[int, seed_option("Of the draws.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Differences B - A between two evaluations of the same samples, with confidence intervals."""
    need("torch", command="mt eval compare")
    from mt_eval.comparison import Bootstrap
    from mt_eval.comparison import compare as compare_files

    differences = compare_files(first, second, Bootstrap(resamples, confidence, seed))
    if as_json:
        settings = {"first": str(first), "second": str(second), "resamples": resamples, "seed": seed}
        tasks = {
            task: {metric: asdict(difference) for metric, difference in metrics.items()}
            for task, metrics in differences.items()
        }
        typer.echo(json.dumps({**settings, "confidence": confidence, "tasks": tasks}, indent=2))
    else:
        show(differences, confidence)


def show(differences: dict[str, dict[str, Difference]], confidence: float) -> None:
    """An interval without 0 (of perplexity's ratio: without 1) is marked."""
    from mt_eval.comparison import PERPLEXITY

    table = Table("task", "metric", "A", "B", "B - A", f"{confidence:.0%} interval", "", "samples", box=None)
    for task, metrics in differences.items():
        for metric, difference in metrics.items():
            is_ratio = metric == PERPLEXITY
            differs = not difference.low <= (1.0 if is_ratio else 0.0) <= difference.high
            change = f"{'x ' if is_ratio else ''}{difference.difference:.4f}"
            values = (
                f"{difference.first:.4f}",
                f"{difference.second:.4f}",
                change,
                f"{difference.low:.4f} to {difference.high:.4f}",
            )
            table.add_row(task, metric, *values, "*" if differs else "", f"{difference.samples:,}")
    Console().print(table)


# -- contamination -----------------------------------------------------------------------------------

SHOWN = 10
"""Samples that are printed; all are in the result file."""


@with_fields
def contamination(
    task: Annotated[Path, typer.Argument(parser=as_path, metavar="TASKFILE", help="JSON lines or Parquet.")],
    train: Annotated[list[str], typer.Option(help="Training files or quoted globs. Repeatable.", show_default=False)],
    output: Annotated[Path, typer.Option(help="Result file (JSON), which lists the samples.", metavar="FILE")],
    eval_keys: Annotated[
        list[str],
        typer.Option(help="Key of the task's records with text to search for. Repeatable.", show_default=False),
    ],
    ngrams: NgramOptions,
    reading: ReadingOptions,
    text_key: TextKey = "text",
) -> None:
    """Which samples of a task are in a training set, by shared n-grams."""
    from mt_data.corpora.options import OverlapOptions
    from mt_data.corpora.running import RunOptions
    from mt_eval.contamination import find_contamination

    options = OverlapOptions(**asdict(ngrams))
    with progress("contamination") as advance:
        run = RunOptions(
            output.with_suffix(".work"),
            reading=reading.of_key(text_key),
            workers=reading.workers,
            overwrite=True,
            advance=advance,
        )
        overlaps = find_contamination(task, eval_keys, train, options, run).to_dict()
    settings = {"task": str(task), "train": train, **asdict(ngrams), "eval_keys": eval_keys}
    write_whole(output, (json.dumps({**settings, **overlaps}, indent=2, ensure_ascii=False) + "\n").encode())
    show_contamination(overlaps)


def show_contamination(report: dict[str, object]) -> None:
    overlaps = report["overlaps"]
    assert isinstance(overlaps, list)
    typer.echo(
        f"{report['contaminated']:,} of {report['samples']:,} samples share n-grams with the training set; "
        f"{report['too_short']:,} are too short to be searched for"
    )
    _print_table(overlaps, "first shared words")
    common = report["ignored_as_common"]
    assert isinstance(common, dict)
    if common["ngrams"]:
        typer.echo(
            f"{common['ngrams']:,} n-grams of {common['samples']:,} samples are in more training documents than "
            "--max-documents, and were ignored as common phrases:"
        )
        _print_table(common["overlaps"], "first ignored words")
    typer.echo(f"words were compared in {report['normalization']}")


def _print_table(overlaps: list[dict[str, Any]], words: str) -> None:
    table = Table("sample", "share", words, box=None)
    for overlap in overlaps[:SHOWN]:
        table.add_row(overlap["name"], f"{overlap['share']:.0%}", overlap["words"])
    if overlaps:
        Console().print(table)
