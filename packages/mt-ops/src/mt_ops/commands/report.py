"""`mt report`: one HTML file about one or several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mt_core.errors import ConfigError

POINTS = 3_000_000


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run directories; logs of Megatron-LM and torchtitan, trainer_state.json, event files."),
    ],
    output: Annotated[Path, typer.Option("-o", "--out", help="The file to write.")] = Path("report.html"),
    points: Annotated[
        int, typer.Option(help="Most values of all curves; of longer ones extremes are kept.", min=1000)
    ] = POINTS,
    plan: Annotated[
        bool, typer.Option("--plan", help="Plan the memory of ranks, beside what they took (mt-ops[deep]).")
    ] = False,
) -> None:
    """Write a page about training runs that opens from disk and loads nothing from outside.

    Curves with zoom, several runs over steps, tokens, samples or time; what differs between their configurations; where
    the time went, memory of ranks, layout, events, evaluations, samples. Steps that a resume repeated count once.
    """
    from mt_core.paths import write_whole
    from mt_ops.reading.opening import open_runs
    from mt_ops.report.page import report as page

    opened = open_runs(runs)
    if plan:
        from mt_ops.memory_plan import add_planned_memory

        for problem in add_planned_memory(opened):
            typer.echo(problem, err=True)
    try:
        content = page(opened, points).encode()
        write_whole(output, content)
    except OSError as error:
        raise ConfigError(f"--out {output}: {error.strerror or error}; choose another file") from error
    typer.echo(f"{output}: {len(opened)} {'run' if len(opened) == 1 else 'runs'}, {len(content) / 1e6:.1f} MB")
