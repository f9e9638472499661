"""`mt moe`: a heat map (SVG) of one metric over a run, with a row for each layer and a column for each step."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated

import typer

from mt_core.errors import DataError, did_you_mean
from mt_core.wording import counted

NAME = re.compile(r"moe/layer_(\d+)/(\w+)")
MOST_COLUMNS = 120
WIDTH, ROW, LEFT, TOP, BOTTOM, RIGHT = 720, 22, 64, 44, 34, 96
LOW, HIGH = (247, 246, 240), (158, 28, 56)
"""Colours of the lowest and of the highest value."""


@dataclass(frozen=True)
class History:
    """values[i][j]: the metric of layer layers[i] at step steps[j]; None where it was not logged."""

    metric: str
    layers: Sequence[int]
    steps: Sequence[int]
    values: Sequence[Sequence[float | None]]


def read_history(path: Path, metric: str) -> History:
    """The lines of a metrics.jsonl. Raises DataError when it has no such metric."""
    values: dict[tuple[int, int], float] = {}
    names: set[str] = set()
    for step, name, value in _entries(path):
        layer, metric_name = name
        names.add(metric_name)
        if metric_name == metric:
            values[layer, step] = value
    if not values:
        known = f"it has {', '.join(sorted(names))}" if names else "it has none of a mixture of experts"
        raise DataError(f"{path}: no metric moe/layer_N/{metric}{did_you_mean(metric, names)}; {known}")
    layers = sorted({layer for layer, _ in values})
    steps = sorted({step for _, step in values})
    return History(metric, layers, steps, [[values.get((layer, step)) for step in steps] for layer in layers])


def _entries(path: Path) -> Iterator[tuple[int, tuple[int, str], float]]:
    """(step, (layer, metric), value)"""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; name a run directory or its metrics.jsonl") from error
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except ValueError:
            if number == len(lines):  # cut short by a kill
                return
            raise DataError(f"{path}: line {number} is no JSON") from None
        for name, value in entry.items():
            if match := NAME.fullmatch(name):
                yield int(entry["iteration"]), (int(match[1]), match[2]), float(value)


def draw(history: History) -> str:
    """The heat map as an SVG document."""
    history = _thinned(history)
    numbers = [value for row in history.values for value in row if value is not None]
    low, high = min(numbers), max(numbers)
    width = (WIDTH - LEFT - RIGHT) / len(history.steps)
    height = TOP + ROW * len(history.layers) + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(LEFT, 20, f"{history.metric} of each layer over steps", size=14),
    ]
    for i, (layer, row) in enumerate(zip(history.layers, history.values, strict=True)):
        top = TOP + i * ROW
        parts.append(_text(LEFT - 8, top + ROW / 2 + 4, f"layer {layer}", anchor="end"))
        for j, (step, value) in enumerate(zip(history.steps, row, strict=True)):
            if value is not None:
                label = f"layer {layer}, step {step}: {value:.4g}"
                parts.append(_cell(LEFT + j * width, top, width, _colour(value, low, high), label))
    parts += _step_labels(history, width, height)
    parts += _scale(low, high)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _thinned(history: History) -> History:
    """At most MOST_COLUMNS steps, evenly spaced, including the first and the last."""
    count = len(history.steps)
    if count <= MOST_COLUMNS:
        return history
    # MOST_COLUMNS numbers from 0 to count - 1.
    kept = [round(i * (count - 1) / (MOST_COLUMNS - 1)) for i in range(MOST_COLUMNS)]
    return History(
        history.metric,
        history.layers,
        [history.steps[i] for i in kept],
        [[row[i] for i in kept] for row in history.values],
    )


def _step_labels(history: History, width: float, height: int) -> list[str]:
    count = len(history.steps)
    shown = sorted({0, count // 4, count // 2, 3 * count // 4, count - 1})
    return [
        _text(LEFT + (i + 0.5) * width, height - BOTTOM + 16, str(history.steps[i]), anchor="middle") for i in shown
    ]


def _scale(low: float, high: float) -> list[str]:
    left = WIDTH - RIGHT + 16
    steps = 20
    parts = [_cell(left, TOP + i * 3, 14, _colour(steps - i, 0, steps), "", 3) for i in range(steps + 1)]
    return [*parts, _text(left + 20, TOP + 10, f"{high:.4g}"), _text(left + 20, TOP + 3 * steps + 3, f"{low:.4g}")]


def _colour(value: float, low: float, high: float) -> str:
    share = (value - low) / (high - low) if high > low else 0.0
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(LOW, HIGH, strict=True))


def _cell(x: float, y: float, width: float, colour: str, label: str, height: float = ROW - 2) -> str:
    title = f"<title>{escape(label)}</title>" if label else ""
    return f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" fill="{colour}">{title}</rect>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


# -- `mt moe` ----------------------------------------------------------------------------------------

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

    path = run / METRICS_FILE if run.is_dir() else run
    history = read_history(path, metric)
    target = output or path.parent / f"moe_{metric}.svg"
    target.write_text(draw(history), encoding="utf-8")
    typer.echo(f"{target}: {counted(len(history.layers), 'layer')}, {counted(len(history.steps), 'step')}")
