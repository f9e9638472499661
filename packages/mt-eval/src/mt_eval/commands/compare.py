"""`mt eval compare`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mt_core.commands import need
from mt_core.paths import as_path

if TYPE_CHECKING:
    from mt_eval.comparison import Difference

RESULTS = "A result file of mt eval, with its samples beside it."


def compare(
    first: Annotated[Path, typer.Argument(parser=as_path, metavar="A.json", help=RESULTS)],
    second: Annotated[Path, typer.Argument(parser=as_path, metavar="B.json", help=RESULTS)],
    resamples: Annotated[int, typer.Option(help="Sets of samples that are drawn.")] = 10_000,
    confidence: Annotated[float, typer.Option(help="Of the intervals.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Differences B - A between two evaluations of the same samples, with confidence intervals."""
    need("torch", command="mt eval compare")
    from mt_eval.comparison import Bootstrap
    from mt_eval.comparison import compare as compare_files

    found = compare_files(first, second, Bootstrap(resamples, confidence, seed))
    if as_json:
        settings = {"first": str(first), "second": str(second), "resamples": resamples, "seed": seed}
        tasks = {task: {metric: asdict(one) for metric, one in own.items()} for task, own in found.items()}
        typer.echo(json.dumps({**settings, "confidence": confidence, "tasks": tasks}, indent=2))
    else:
        show(found, confidence)


def show(found: dict[str, dict[str, Difference]], confidence: float) -> None:
    """An interval without 0 (of perplexity's ratio: without 1) is marked."""
    from rich.console import Console
    from rich.table import Table

    from mt_eval.comparison import PERPLEXITY

    table = Table("task", "metric", "A", "B", "B - A", f"{confidence:.0%} interval", "", "samples", box=None)
    for task, metrics in found.items():
        for metric, one in metrics.items():
            is_ratio = metric == PERPLEXITY
            differs = not one.low <= (1.0 if is_ratio else 0.0) <= one.high
            change = f"{'x ' if is_ratio else ''}{one.difference:.4f}"
            values = (f"{one.first:.4f}", f"{one.second:.4f}", change, f"{one.low:.4f} to {one.high:.4f}")
            table.add_row(task, metric, *values, "*" if differs else "", f"{one.samples:,}")
    Console().print(table)
