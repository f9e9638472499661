"""`mt bench`: measures this machine, kernels, training steps and layouts; compares and draws what it measured."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mt_core.commands import host_of, need

if TYPE_CHECKING:
    from mt_tools.bench.machine import Machine
    from mt_tools.bench.report import Case

app = typer.Typer(help="Measure speed and memory; every case is written to a file as soon as it is measured.")

Out = Annotated[Path | None, typer.Option(help="JSON file. Default: bench-KIND.json here.", show_default=False)]
Rounds = Annotated[int, typer.Option(help="Calls of each; medians are taken.", min=1)]


@app.command()
def calibrate(out: Out = None, rounds: Rounds = 30) -> None:
    """What the machine can do at best: products by dtype, copies, launches, the disk."""
    need("torch", command="mt bench calibrate")
    from mt_tools.bench.machine import calibration_cases
    from mt_tools.bench.report import conditions

    _write("calibrate", conditions(rounds=rounds), out, calibration_cases(rounds))


@app.command()
def kernels(
    out: Out = None,
    rounds: Rounds = 30,
    only: Annotated[list[str] | None, typer.Option(help="A kernel; repeatable. Default: all.")] = None,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Also torch.compile of torch's.")] = True,
) -> None:
    """Every implementation of every kernel against torch's and the floor."""
    need("torch", command="mt bench kernels")
    from mt_tools.bench.kernels import measure_kernels

    machine = _machine(rounds)
    cases = measure_kernels(machine, only or (), rounds, compiled=compiled)
    _write("kernels", _conditions(machine, rounds=rounds), out, cases)


@app.command()
def attention(context: typer.Context, out: Out = None, rounds: Rounds = 30) -> None:
    """Every attention backend that serves, at the shapes of models, against the rate of a large product."""
    need("torch", command="mt bench attention")
    from mt_tools.bench.attention import measure_attention

    machine = _machine(rounds)
    _write("attention", _conditions(machine, rounds=rounds), out, measure_attention(machine, rounds, host_of(context)))


@app.command()
def moe(context: typer.Context, out: Out = None, rounds: Rounds = 30) -> None:
    """A layer of experts by each way to multiply their matrices, beside a dense one of as many products a token."""
    need("torch", "mt-models", "mt-moe", "mt-data", command="mt bench moe")
    from mt_tools.bench.moe import measure_moe

    machine = _machine(rounds)
    _write("moe", _conditions(machine, rounds=rounds), out, measure_moe(machine, rounds, host_of(context)))


@app.command()
def train(
    context: typer.Context,
    preset: Annotated[
        list[str] | None, typer.Option(help="124m, 1.2b, 3b, 8b or 7b-a1b; repeatable; all without.")
    ] = None,
    precision: Annotated[str, typer.Option(help="bf16, fp8, mxfp8, nvfp4 or fp32. On a CPU fp32 is quicker.")] = "bf16",
    steps: Annotated[int, typer.Option(help="Steps that are timed.", min=1)] = 30,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value; repeatable.")
    ] = None,
    out: Out = None,
) -> None:
    """Steps of training on random tokens: speed, utilization, memory, where the time goes."""
    need("torch", "mt-models", "mt-data", command="mt bench train")
    from mt_core.errors import ConfigError
    from mt_tools.bench.training import measure_training
    from mt_tools.bench.training_presets import PRECISIONS, PRESETS

    for name in preset or ():
        if name not in PRESETS:
            raise ConfigError(f"--preset {name}: it can be {', '.join(PRESETS)}")
    if precision not in PRECISIONS:
        raise ConfigError(f"--precision {precision}: it can be {', '.join(PRECISIONS)}")
    machine, host = _machine(10), host_of(context)
    cases = (
        case
        for name in preset or PRESETS
        for case in measure_training(name, PRESETS[name], precision, machine, steps, set_ or [], host)
    )
    _write("train", _conditions(machine, steps=steps), out, cases)


@app.command()
def cpu(
    context: typer.Context,
    steps: Annotated[int, typer.Option(help="Pairs of steps.", min=1)] = 30,
    out: Out = None,
) -> None:
    """Our step against a plain loop, operators and bytes counted, imports."""
    need("torch", "mt-models", "mt-data", command="mt bench cpu")
    import torch

    from mt_tools.bench.cpu import cpu_cases
    from mt_tools.bench.report import conditions

    settings = conditions(device="cpu", torch_threads=torch.get_num_threads(), steps=steps)
    _write("cpu", settings, out, cpu_cases(steps, host_of(context)))


@app.command()
def startup(
    rounds: Annotated[int, typer.Option(help="Starts of each; medians are taken.", min=1)] = 21,
    train_rounds: Annotated[int, typer.Option(help="Starts of mt train and of torch.", min=1)] = 5,
    out: Out = None,
) -> None:
    """How long `mt --help`, `mt plugins` and the first step of `mt train` take, against their imports."""
    need("torch", "mt-models", "mt-data", command="mt bench startup")
    from mt_tools.bench.report import conditions
    from mt_tools.bench.startup import startup_cases

    settings = conditions(rounds=rounds, train_rounds=train_rounds)
    _write("startup", settings, out, startup_cases(rounds, train_rounds))


@app.command()
def pipeline(
    context: typer.Context,
    ranks: Annotated[int, typer.Option(help="Processes, each a pipeline rank.", min=2)] = 4,
    micro_batches: Annotated[int, typer.Option(min=1)] = 8,
    unit_ms: Annotated[float, typer.Option(help="Milliseconds that half of a pass of a rank takes.", min=0.1)] = 20.0,
    only: Annotated[list[str] | None, typer.Option(help="A schedule; repeatable. Default: all.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Folder for an SVG of each measured schedule.")] = None,
    out: Out = None,
) -> None:
    """Bubbles of pipeline schedules: measured on ranks whose stages sleep, against the simulator's."""
    need("torch", "mt-models", command="mt bench pipeline")
    from mt_tools.bench.pipeline import PipelineRun, pipeline_cases
    from mt_tools.bench.report import conditions

    run = PipelineRun(ranks, micro_batches, unit_ms / 1000)
    settings = conditions(ranks=ranks, micro_batches=micro_batches, unit_ms=unit_ms)
    _write("pipeline", settings, out, pipeline_cases(run, only or (), svg, host_of(context)))


@app.command()
def sim(context: typer.Context, out: Out = None) -> None:
    """Plans and pipeline schedules at 70B, 405B and DeepSeek-V3 size, without running them."""
    need("torch", "mt-models", "mt-data", command="mt bench sim")
    from itertools import chain

    from mt_tools.bench.report import conditions
    from mt_tools.bench.simulation import plan_cases, schedule_cases

    host = host_of(context)
    _write("sim", conditions(), out, chain(schedule_cases(host), plan_cases(host)))


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="Report of mt bench.")],
    after: Annotated[Path, typer.Argument(help="Another of the same kind.")],
    tolerance: Annotated[float, typer.Option(help="Part that is taken for noise.", min=0.0)] = 0.05,
) -> None:
    """Say what got worse from one report to another; exits with 1 if something did."""
    from mt_tools.bench.report import compare as changes_between
    from mt_tools.bench.report import missing, read_report

    old, new = read_report(before), read_report(after)
    changes = changes_between(old, new)
    worse = [change for change in changes if change.is_worse(tolerance)]
    better = [change for change in changes if change.ratio > 1.0 + tolerance]
    for title, listed in (("worse", worse), ("better", better[::-1])):
        for change in listed:
            typer.echo(f"{title}: {change.case}, {change.metric}: {change.before:.4g} -> {change.after:.4g}")
    for name in missing(old, new):
        typer.echo(f"missing: {name}")
    typer.echo(f"{len(changes)} numbers: {len(worse)} worse, {len(better)} better, the rest within {tolerance:.0%}")
    if worse:
        raise typer.Exit(1)


@app.command()
def plot(
    report: Annotated[Path, typer.Argument(help="Report of mt bench train or kernels.")],
    out: Annotated[
        Path | None, typer.Option(help=".html or .svg. Default: HTML beside the report.", show_default=False)
    ] = None,
) -> None:
    """Draw how much of its floor each measurement reaches."""
    from mt_core.errors import ConfigError
    from mt_tools.bench.report import read_report, to_html, to_svg

    target = out or report.with_suffix(".html")
    drawers = {".html": to_html, ".svg": to_svg}
    if target.suffix not in drawers:
        raise ConfigError(f"--out {target}: a picture is written as {' or '.join(drawers)}")
    target.write_text(drawers[target.suffix](read_report(report)), encoding="utf-8")
    typer.echo(f"written to {target}")


def _machine(rounds: int) -> Machine:
    from mt_tools.bench.machine import measure_machine

    return measure_machine(rounds)


def _conditions(machine: Machine, **more: Any) -> dict[str, Any]:
    from mt_tools.bench.report import conditions

    return conditions(**machine.conditions(), **more)


def _write(kind: str, conditions: dict[str, Any], out: Path | None, cases: Iterable[Case]) -> None:
    """Measure case after case, each into the file and onto the console."""
    from mt_tools.bench.report import Report, as_line

    path = out or Path(f"bench-{kind}.json")
    typer.echo(as_line(conditions))
    report = Report(kind, conditions, path, _show)
    for case in cases:
        report.add(case)
    typer.echo(f"written to {path}")


def _show(case: Case) -> None:
    from mt_tools.bench.report import metrics

    typer.echo(f"\n{case['name']}")
    for metric, value in metrics(case):
        typer.echo(f"  {metric:40} {value:,.4g}")
    for kind, share in case.get("time_shares", {}).items():
        typer.echo(f"  time in {kind:32} {share:.1%}")
