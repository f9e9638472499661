"""`mt profile`: where the time of training steps goes."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mt_core.commands import host_of, log_on_stderr, need
from mt_core.errors import ConfigError
from mt_core.specs import COMMANDS

SHOWN = 0.001
"""Share of a step from which the table has a row."""
ABOVE = (
    "* above the roof: it is an estimate of what products reach, and FLOPs of attention count all scores, of which "
    "causality needs half"
)


def profile(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Argument(help="A configuration, a run directory, or a folder with a recording.", show_default=False),
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Values to start from.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value; repeatable.")
    ] = None,
    steps: Annotated[str, typer.Option(metavar="A:B", help="Steps to record, from 1.")] = "3:5",
    nproc: Annotated[int | None, typer.Option(help="Processes to start on this machine.", min=1)] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the traces.")] = Path("profile"),
    by_layer: Annotated[bool, typer.Option("--by-layer", help="A row for each layer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Train a few steps, record them, and say where their time goes and which key would change it.

    Writes trace.json.gz, which ui.perfetto.dev opens: all ranks, with the names of layers. The table has the share of
    each part, and of the products the fraction of what the device reaches at most. Recording makes steps slower; shares
    stay.
    """
    need("torch", "mt-models", command="mt profile")
    folder = output
    if config is not None and list(config.glob("summary-rank-*.json")):
        folder = config
    else:
        with log_on_stderr(as_json):
            _record(context, config, preset, set_ or [], steps, nproc, folder)
    _report(folder, by_layer=by_layer, as_json=as_json)


def parse_steps(text: str) -> tuple[int, int]:
    """ "3:5" -> (3, 5). Raises ConfigError for anything else."""
    first, colon, last = text.partition(":")
    if not (colon and first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise ConfigError(f"--steps {text}: expected A:B with 1 <= A <= B, such as 3:5")
    return int(first), int(last)


def _record(
    context: typer.Context,
    config: Path | None,
    preset: str | None,
    settings: list[str],
    steps: str,
    nproc: int | None,
    folder: Path,
) -> None:
    first, last = parse_steps(steps)
    if config is not None and config.is_dir():
        settings = [f"checkpoint.load={config}", "checkpoint.resume=never", *settings]
        config = config / "config.json"
    for old in [*folder.glob("summary-rank-*.json"), *folder.glob("trace-rank-*.json.gz")]:
        old.unlink()
    ours = [
        'train.callbacks=["profile"]',
        f"profile.first_step={first}",
        f"profile.last_step={last}",
        f"profile.folder={json.dumps(str(folder.absolute()))}",
        f"train.exit_iteration={last}",
        "train.eval_interval=null",
        "train.sample_prompt=null",
        "train.deferred_metrics=never",
        "checkpoint.save_interval=null",
    ]
    train = host_of(context)[COMMANDS].get("train", key="mt profile").app.load()
    # Of a run that is recorded nothing is kept but the traces.
    with tempfile.TemporaryDirectory(prefix="mt-profile-") as run_dir:
        try:
            train(context, config=config, preset=preset, set_=[*settings, *ours], run_dir=Path(run_dir), nproc=nproc)
        except typer.Exit as ended:
            # 75: stopped before the end of its schedule, as it should.
            if ended.exit_code not in (0, 75):
                raise


def _report(folder: Path, *, by_layer: bool, as_json: bool) -> None:
    from mt_tools.profile.report import losses, merge_traces, read_summaries, rows
    from mt_tools.profile.roof import roof_tflops

    summaries = read_summaries(folder)
    trace, first = merge_traces(folder), summaries[0]
    roof = first["roof_tflops"] if "roof_tflops" in first else roof_tflops(first["device"])
    table, largest = rows(summaries, by_layer=by_layer), losses(summaries, roof)
    seconds = sum(summary["seconds"] for summary in summaries) / len(summaries)
    if as_json:
        content: dict[str, Any] = {
            "seconds": seconds,
            "roof_tflops": roof,
            "trace": str(trace),
            "rows": [asdict(row) for row in table],
            "losses": [asdict(loss) for loss in largest],
        }
        typer.echo(json.dumps(content, indent=2))
        return
    console = Console(markup=False, highlight=False)
    roof_text = "not known" if roof is None else f"{roof:.3g} TFLOP/s"
    console.print(
        f"{1000 * seconds:.1f} ms a recorded step, {len(summaries)} rank(s); the roof of products: {roof_text}"
    )
    console.print(_table(table, roof))
    if roof and any(row.tflops is not None and row.tflops > roof and row.share >= SHOWN for row in table):
        console.print(ABOVE, soft_wrap=True)
    console.print("\nThe largest losses of a step, and the key that would change each:")
    for loss in largest:
        console.print(f"  {1000 * loss.seconds:8.1f} ms  {loss.what}: {loss.key}", soft_wrap=True)
    console.print(f"\n{trace}: open it in ui.perfetto.dev", soft_wrap=True)


def _table(rows: Any, roof: float | None) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("part", "direction"):
        table.add_column(name)
    for name in ("ms", "share", "TFLOP/s", "of the roof"):
        table.add_column(name, justify="right")
    for row in rows:
        if row.share < SHOWN:
            continue
        rate = "" if row.tflops is None else f"{row.tflops:.3g}"
        fraction = (
            "" if row.tflops is None or not roof else f"{row.tflops / roof:.0%}{'*' if row.tflops > roof else ''}"
        )
        table.add_row(row.name, row.direction, f"{1000 * row.seconds:.2f}", f"{row.share:.1%}", rate, fraction)
    return table
