"""`mt plot`: a curve as a picture, or in the terminal."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Literal

import typer

from mt_core.errors import ConfigError


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Runs; what mt report reads.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="A .svg, .png or .pdf. Default: the terminal.", show_default=False),
    ] = None,
    metric: Annotated[str, typer.Option(help="Name in metrics.jsonl, such as valid_loss.")] = "loss",
    over: Annotated[Literal["step", "samples", "tokens", "time"], typer.Option(help="The horizontal axis.")] = "step",
    smooth: Annotated[int, typer.Option(help="Mean of so many points.", min=1)] = 1,
    log_x: Annotated[bool, typer.Option("--log-x", help="Logarithmic horizontal axis.")] = False,
    log_y: Annotated[bool, typer.Option("--log-y", help="Logarithmic vertical axis.")] = False,
) -> None:
    """Draw a metric of one or several runs: as SVG, PNG or PDF for a paper, or as text in the terminal."""
    from mt_ops.plot.curves import picture
    from mt_ops.plot.matplotlib_figure import write_figure
    from mt_ops.plot.svg import draw
    from mt_ops.plot.terminal import draw as draw_text
    from mt_ops.reading.opening import open_runs

    drawn = picture(open_runs(runs), metric, over, smooth, log_x=log_x, log_y=log_y)
    if output is None:
        size = shutil.get_terminal_size((100, 30))
        typer.echo(draw_text(drawn, size.columns, min(size.lines - 2, 40)))
        return
    if output.suffix not in (".svg", ".png", ".pdf"):
        raise ConfigError(f"--out {output}: a picture is .svg, .png or .pdf")
    try:
        if output.suffix == ".svg":
            output.write_text(draw(drawn), encoding="utf-8")
        else:
            write_figure(drawn, output)
    except OSError as error:
        raise ConfigError(f"--out {output}: {error.strerror or error}; choose another file") from error
    typer.echo(f"{output}: {drawn.y_label} of {len(drawn.curves)} {'run' if len(drawn.curves) == 1 else 'runs'}")
