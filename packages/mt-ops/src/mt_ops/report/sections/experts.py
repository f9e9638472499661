"""The load of experts: by layer and step, and of each expert of a layer."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np

from mt_ops.reading.run import Run, Series
from mt_ops.report.charts import BY_LAYER
from mt_ops.report.html import Section, details, note
from mt_ops.report.png import indexed_png

COLUMNS, LEVELS = 80, 8
OF_LAYER = re.compile(re.escape(BY_LAYER) + r"(\d+)/(.+)")
MOST_MAPS = 6
"""Runs with a map."""


def expert_load(runs: Sequence[Run]) -> Section | None:
    with_experts = [run for run in runs if any(name.startswith(BY_LAYER) for name in run.series)]
    parts = [
        details(f"{run.name}: {metric.replace('_', ' ')}", _map(layers), is_open=len(with_experts) == 1)
        for run in with_experts[:MOST_MAPS]
        for metric, layers in _by_metric(run).items()
    ]
    parts += [_experts_of(run) for run in runs[:MOST_MAPS] if run.experts]
    return Section("experts", "Load of experts by layer and step", "".join(parts)) if parts else None


def _by_metric(run: Run) -> dict[str, dict[int, Series]]:
    """Metric -> layer -> its values."""
    metrics: dict[str, dict[int, Series]] = {}
    for name, series in run.series.items():
        if (match := OF_LAYER.fullmatch(name)) is not None and len(series):
            metrics.setdefault(match.group(2), {})[int(match.group(1))] = series
    return metrics


def _map(layers: Mapping[int, Series]) -> str:
    """Rows are layers, columns are ranges of steps; a box has the largest value of its range."""
    steps = np.unique(np.concatenate([series.steps for series in layers.values()]))
    last = int(steps[-1])
    # Equal numbers of lines of the log, so that no column is empty.
    firsts = np.linspace(0, len(steps), min(COLUMNS, len(steps)), endpoint=False).astype(int)
    edges = np.append(steps[firsts], last + 1)
    rows = {layer: _largest(series, edges) for layer, series in sorted(layers.items())}
    known = [value for row in rows.values() for value in row if np.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    span = high - low or 1.0
    boxes = []
    for y, (layer, row) in enumerate(rows.items()):
        boxes.append(f'<text class="label" x="0" y="{y * 16 + 12}">layer {layer}</text>')
        for x, value in enumerate(row):
            if np.isfinite(value):
                level = min(int((value - low) / span * LEVELS), LEVELS - 1)
                title = f"<title>layer {layer}, steps {edges[x]} to {edges[x + 1] - 1}: {value:.4g}</title>"
                boxes.append(
                    f'<rect class="h{level}" x="{64 + x * 10}" y="{y * 16}" width="10" height="15">{title}</rect>'
                )
    width, height = 64 + (len(edges) - 1) * 10, len(rows) * 16
    label = f"heat map of {len(rows)} layers over {last} steps, from {low:.4g} to {high:.4g}"
    words = f"from {low:.4g} (dark) to {high:.4g} (bright), steps {steps[0]:,} to {last:,}"
    svg = f'<svg role="img" aria-label="{label}" width="{width}" height="{height}">{"".join(boxes)}</svg>'
    return f'<div class="scroll" tabindex="0">{svg}</div>' + note(words)


def _largest(series: Series, edges: Any) -> list[float]:
    cuts = np.searchsorted(series.steps, edges)
    return [
        float(np.nanmax(series.values[begin:end]))
        if end > begin and np.isfinite(series.values[begin:end]).any()
        else np.nan
        for begin, end in pairwise(cuts)
    ]


# -- single experts ----------------------------------------------------------------------------------

BOUNDS = (1, 25, 50, 80, 125, 200, 400)
"""Percent of the mean at which the next colour begins: an expert without tokens has the first one."""
VIRIDIS = ("440154", "46327e", "365c8d", "277f8e", "1fa187", "4ac16d", "a0da39", "fde725")
MOST_STEPS, MOST_LAYERS = 240, 128


def _experts_of(run: Run) -> str:
    layers = sorted(run.experts)[:MOST_LAYERS]
    steps = [step for layer in layers[:1] for step in sorted(run.experts[layer])]
    words = (
        f"Rows are experts, columns {len(steps)} lines of the log from step {min(steps):,} to {max(steps):,}; "
        "the load in percent of the mean:"
    )
    images = "".join(_image(layer, run.experts[layer]) for layer in layers)
    return details(f"{run.name}: load of each expert", note(words) + _legend() + images)


def _legend() -> str:
    labels = ["0", *(f"{low} to {high}" for low, high in pairwise(BOUNDS)), f"{BOUNDS[-1]} and more"]
    boxes = "".join(f'<span class="heat k{level}"></span>{escape(label)} ' for level, label in enumerate(labels))
    return f'<p class="note">{boxes}</p>'


def _image(layer: int, by_step: Mapping[int, Sequence[float]]) -> str:
    """A picture of [experts, steps]."""
    steps = sorted(by_step)
    kept = [steps[place] for place in np.linspace(0, len(steps) - 1, min(len(steps), MOST_STEPS)).astype(int)]
    loads = np.array([by_step[step] for step in kept], dtype=float).T
    png = base64.b64encode(indexed_png(np.digitize(loads, BOUNDS).astype(np.uint8), VIRIDIS)).decode()
    last = loads[:, -1]
    words = (
        f"layer {layer}: at step {kept[-1]:,} expert {int(last.argmax())} has most, {last.max():.0f} % of the mean, "
        f"expert {int(last.argmin())} least, {last.min():.0f} %; {int((last == 0).sum())} of {len(last)} have none"
    )
    height = min(max(3 * len(last), 48), 512)
    return (
        f'<figure><figcaption class="note">{words}</figcaption>'
        f'<img class="heat-map" alt="{words}" height="{height}" src="data:image/png;base64,{png}"></figure>'
    )
