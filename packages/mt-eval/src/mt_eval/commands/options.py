"""Options that the commands of mt eval share, and how they run tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mt_core.commands import listed, need
from mt_core.errors import ConfigError, PluginError
from mt_core.paths import as_path
from mt_infer.commands.layout import NPROC, SETTINGS, engine_settings, on_ranks, progress_bar

if TYPE_CHECKING:
    from mt_eval.evaluation import Evaluation
    from mt_eval.tasks import Task
    from mt_infer.text import TextGenerator

CHECKPOINT = Annotated[
    Path, typer.Argument(parser=as_path, metavar="PATH", help="A run directory, or a checkpoint of any format.")
]
OUTPUT = Annotated[
    Path | None,
    typer.Option(help="Result file (JSON); samples go beside it, and a killed run goes on from them.", metavar="FILE"),
]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print the result file instead of a table.")]
LIMIT = Annotated[int | None, typer.Option(min=1, help="The first samples of each task only.")]
CHAT_TEMPLATE = Annotated[
    str | None, typer.Option(help="tokenizer, chatml, llama3 or plain. Default: that of training, else plain.")
]
STOP = Annotated[list[str] | None, typer.Option(help="Text that ends an answer. Repeatable.", show_default=False)]
DEVICE = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
SEQ_LENGTH = Annotated[
    int | None, typer.Option(min=1, help="Positions of a window. Default: as many as the model has.")
]

LARGEST_SEED = 2**32 - 1
"""Limit of train.seed, and of numpy.random.seed, which lm_eval calls."""


def seed_option(text: str, *names: str) -> Any:
    """An option for a seed of 32 bits, with the help `text`."""
    return typer.Option(*names, min=0, max=LARGEST_SEED, help=text)


@dataclass(frozen=True)
class EvaluationOptions:
    """Where an evaluation runs, and what it writes."""

    output: OUTPUT = None
    as_json: AS_JSON = False
    set_: SETTINGS = None
    device: DEVICE = "auto"
    nproc: NPROC = None


def run_tasks(
    context: typer.Context, path: Path, build: Callable[[TextGenerator], Sequence[Task]], run: EvaluationOptions
) -> None:
    """Loads the model on all ranks, evaluates the tasks that `build` gives, and prints the result."""
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt eval")

    def use(generator: TextGenerator) -> None:
        from mt_eval.evaluation import evaluate

        tasks = build(generator)
        with progress_bar() as bar:
            rows = {id(task): bar.add_task(task.name, total=len(task)) for task in tasks}
            evaluation = evaluate(
                generator,
                tasks,
                path,
                output=run.output,
                on_sample=lambda task, done: bar.update(rows[id(task)], completed=done),
            )
        show(evaluation, run.as_json)

    on_ranks(context, path, engine_settings(run.set_ or []), run.device, run.nproc, use)


def named_files(entries: Sequence[str]) -> dict[str, str]:
    """NAME=FILE, or a file, whose name without endings is its name. Raises ConfigError for a name that occurs twice."""
    named = [_named(entry) for entry in entries]
    if len(dict(named)) < len(named):
        names = ", ".join(name for name, _ in named)
        raise ConfigError(f"--data: two texts have one name, of {names}; give them as NAME=FILE")
    return dict(named)


def _named(entry: str) -> tuple[str, str]:
    name, equals, file = entry.partition("=")
    if equals and name:
        return name, file
    return Path(entry).name.partition(".")[0] or entry, entry


def named_options(entries: Sequence[str], option: str) -> dict[str, str]:
    """KEY=VALUE -> key -> value. Raises ConfigError for another form, naming the option."""
    pairs = [entry.partition("=") for entry in entries]
    for entry, (name, equals, _) in zip(entries, pairs, strict=True):
        if not name or not equals:
            raise ConfigError(f"{option} {entry}: give KEY=VALUE")
    return {name: value for name, _, value in pairs}


def need_extra(extra: str, *modules: str, command: str) -> None:
    """Raises PluginError without the packages of an extra of mt-eval."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise PluginError(f'{command} needs {listed(missing)}; pip install "mt-eval[{extra}]"')


def window_length(generator: TextGenerator, seq_length: int | None) -> int:
    """Raises ConfigError for a window that is longer than the model's sequences."""
    if seq_length is not None and seq_length > generator.longest:
        raise ConfigError(
            f"--seq-length {seq_length}: the model's sequences have {generator.longest} positions at most"
        )
    return seq_length or generator.longest


def show(evaluation: Evaluation, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(evaluation.to_dict(), indent=2, ensure_ascii=False))
        return
    table = Table("task", "metric", "value", box=None)
    for name, result in evaluation.tasks.items():
        for metric, value in result.metrics.items():
            table.add_row(name, metric, f"{value:,.0f}" if float(value).is_integer() and value > 1 else f"{value:.4f}")
    Console().print(table)
    for name, result in evaluation.tasks.items():
        for note in notes(name, result.samples, result.truncated, result.not_scored, dict(result.reasons)):
            typer.echo(note)


def notes(name: str, samples: int, truncated: int, not_scored: int, reasons: dict[str, str]) -> list[str]:
    """What belongs beside the numbers."""
    lines = []
    if truncated:
        lines.append(f"{name}: {truncated:,} of {samples:,} samples were cut to the model's length")
    if not_scored:
        first, why = next(iter(reasons.items()))
        lines.append(f"{name}: {not_scored:,} samples could not be scored; {first}: {why}")
    return lines
