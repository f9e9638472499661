"""`mt compare`: the first step and quantity in which two runs part, and what explains it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mt_core.errors import DataError

PARTED = 1


def compare(
    a: Annotated[Path, typer.Argument(help="A run; what mt report reads.", metavar="A", show_default=False)],
    b: Annotated[Path, typer.Argument(help="Another one.", metavar="B", show_default=False)],
    tolerance: Annotated[
        float, typer.Option(help="Relative difference from which losses and norms part.", min=0.0)
    ] = 1e-3,
    samples: Annotated[
        int, typer.Option(help="Build the data sets of both runs of mt, and compare so many samples.", min=0)
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare two runs: configuration, environment, samples, learning rate and counters, losses and norms.

    Names the first step and quantity in which they part, and the differences of configuration and the events that
    explain it. Exit code 0 when they agree within the tolerance, 1 when they part.
    """
    from mt_ops.compare.comparison import compare as compare_runs
    from mt_ops.compare.comparison import lines, to_dict
    from mt_ops.reading.opening import open_runs

    first, second = open_runs([a, b])
    other = _other_sample(a, b, samples) if samples else None
    compared = compare_runs(first, second, tolerance, other)
    if as_json:
        typer.echo(json.dumps(to_dict(compared), indent=2))
    else:
        typer.echo("\n".join(lines(compared)))
    if not compared.quantities:
        raise DataError(f"{a} and {b} have no quantity at the same step; compare runs that were logged at equal steps")
    if compared.first is not None:
        raise typer.Exit(PARTED)


def _other_sample(a: Path, b: Path, count: int) -> str | None:
    from mt_ops.compare.drawn_samples import first_other_sample

    return first_other_sample(a, b, count)
