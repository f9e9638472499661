"""`mt moe`: plots the expert load over a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Look at the load of experts.")

METRICS_FILE = "metrics.jsonl"


@app.callback()
def moe() -> None:
    """Look at the load of experts."""


@app.command()
def plot(
    run: Annotated[Path, typer.Argument(help="A run directory, or its metrics.jsonl.")],
    metric: Annotated[
        str, typer.Option(help="What to draw, for instance load_entropy, dead_experts or dropped_share.")
    ] = "load_max_over_mean",
    output: Annotated[
        Path | None, typer.Option(help="The SVG file. Default: moe_METRIC.svg beside the metrics.")
    ] = None,
) -> None:
    """Draw one number of every layer over the steps of a run, as an SVG file."""
    from mt_moe.plot import draw, read_history

    path = run / METRICS_FILE if run.is_dir() else run
    history = read_history(path, metric)
    target = output or path.parent / f"moe_{metric}.svg"
    target.write_text(draw(history), encoding="utf-8")
    typer.echo(f"{target}: {len(history.layers)} layers, {len(history.steps)} steps")
