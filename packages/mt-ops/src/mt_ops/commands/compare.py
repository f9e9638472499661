"""`mt compare`: the first step and quantity in which two runs part, and what explains it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mt_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from mt_ops.compare.drawn_samples import DrawnSamples
    from mt_ops.deep.comparison import Other
    from mt_ops.reading.run import Run

PARTED = 1
CONFIGURATIONS = {".toml", ".json", ".yaml", ".yml"}
"""Endings of two paths that --deep takes as configurations."""


def compare(
    a: Annotated[Path, typer.Argument(help="A run; what mt report reads.", metavar="A", show_default=False)],
    b: Annotated[Path, typer.Argument(help="Another one.", metavar="B", show_default=False)],
    tolerance: Annotated[
        float, typer.Option(help="Relative difference from which losses and norms part.", min=0.0)
    ] = 1e-3,
    samples: Annotated[
        int, typer.Option(help="Build the data sets of both runs of mt, and compare so many samples.", min=0)
    ] = 0,
    deep: Annotated[
        bool, typer.Option("--deep", help="Run both, and name the first tensor that differs.", rich_help_panel="Deep")
    ] = False,
    steps: Annotated[int, typer.Option(help="With --deep: steps to run.", min=1, max=50, rich_help_panel="Deep")] = 2,
    python_b: Annotated[
        Path | None,
        typer.Option(
            help="With --deep: Python of another environment, which computes B with its version.",
            show_default=False,
            rich_help_panel="Deep",
        ),
    ] = None,
    megatron: Annotated[
        bool,
        typer.Option(
            "--megatron-b",
            help="With --deep: Megatron-Core of that environment computes B, a checkpoint of its own.",
            rich_help_panel="Deep",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare two runs: configuration, environment, samples, learning rate and counters, losses and norms.

    Names the first step and quantity in which they part, and the differences of configuration and the events that
    explain it. Exit code 0 when they agree within the tolerance, 1 when they part.

    With --deep A and B are two checkpoints (mt's, or Hugging Face folders) or two configurations (.toml, .json).
    """
    if deep:
        _compare_deep(a, b, steps, python_b, megatron, as_json)
        return
    if python_b is not None or megatron:
        raise ConfigError("--python-b and --megatron-b are of a deep comparison; add --deep")
    from mt_ops.compare.comparison import compare as compare_runs
    from mt_ops.compare.comparison import lines, to_dict
    from mt_ops.reading.opening import open_runs

    first, second = open_runs([a, b])
    drawn = _drawn_samples(first, second, samples) if samples else None
    compared = compare_runs(first, second, tolerance, drawn)
    if as_json:
        typer.echo(json.dumps(to_dict(compared), indent=2))
    else:
        typer.echo("\n".join(lines(compared)))
    if not compared.quantities:
        raise DataError(f"{a} and {b} have no quantity at the same step; compare runs that were logged at equal steps")
    if compared.first is not None:
        raise typer.Exit(PARTED)


def _drawn_samples(a: Run, b: Run, count: int) -> DrawnSamples:
    from mt_ops.compare.drawn_samples import drawn_samples

    return drawn_samples(a, b, count)


def _compare_deep(a: Path, b: Path, steps: int, python_b: Path | None, megatron: bool, as_json: bool) -> None:
    from dataclasses import asdict

    from mt_ops.deep.comparison import compare_models, lines

    if megatron and python_b is None:
        raise ConfigError("--megatron-b needs --python-b, the python of an environment with megatron-core")
    if {a.suffix, b.suffix} <= CONFIGURATIONS and not megatron:
        from mt_ops.deep.layouts import compare_configurations

        compared = compare_configurations(a, b, steps, python_b)
    else:
        compared = compare_models(a, b, steps, other=_elsewhere(python_b, megatron))
    typer.echo(json.dumps(asdict(compared), indent=2) if as_json else "\n".join(lines(compared)))
    if compared.first:
        raise typer.Exit(PARTED)


def _elsewhere(python: Path | None, megatron: bool) -> Other | None:
    """What computes B in another process."""
    if python is None:
        return None
    from functools import partial

    from mt_ops.deep.other_process import recordings_of

    module = "mt_ops.deep.megatron_child" if megatron else "mt_ops.deep.child"
    return partial(recordings_of, python, module=module)
