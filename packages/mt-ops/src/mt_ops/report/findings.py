"""What the numbers of a run say is wrong with it, a line each: experts without tokens, growing memory, a slow rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mt_ops.reading.run import Run, Series
from mt_ops.report.charts import BY_LAYER
from mt_ops.report.html import size

GIB = 2.0**30
RECENT = 20
"""Lines of the log that count as now."""
FEWEST = 12
"""Lines of the log from which growth can be told."""
STEADY = 0.9
"""Part of the variance of memory that a line over steps explains, from which it counts as growth."""
GROWTH = 0.01
"""Growth of memory over the steps that are looked at, as a part of it."""
WAITS_MORE = 0.1
"""Part of the time by which other ranks wait more than the slowest one."""
DEAD = re.compile(re.escape(BY_LAYER) + r"(\d+)/dead_experts")


def findings(run: Run) -> Iterator[str]:
    yield from _experts(run)
    yield from _memory(run)
    slow = slowest(run.status)
    if slow is not None:
        yield f"rank {slow.get('rank')} on {slow.get('host')} waits least for others: they wait for it"


def _experts(run: Run) -> Iterator[str]:
    """Layers in which experts had no token in any of the last lines' steps, on average at least one."""
    dead_layers = []
    for name, series in run.series.items():
        if (match := DEAD.fullmatch(name)) is not None and (dead := _recent_mean(series)) >= 1:
            dead_layers.append((dead, int(match.group(1))))
    if dead_layers:
        named = ", ".join(f"layer {layer} {dead:.3g}" for dead, layer in sorted(dead_layers, reverse=True)[:8])
        yield f"experts without a token: {named} (mean of the last {RECENT} lines of the log)"


def _recent_mean(series: Series) -> float:
    values = series.values[-RECENT:]
    return float(np.nanmean(values)) if np.isfinite(values).any() else 0.0


def _memory(run: Run) -> Iterator[str]:
    series = run.series.get("host_memory_gb")
    if series is None or (per_step := growth(series)) is None:
        return
    last, steps = series.values[-1], int(series.steps[-1])
    yield (
        f"host memory grows by {size(per_step * GIB)} a step: {last:.2f} GiB at step {steps:,}, "
        f"{last + per_step * steps:.2f} GiB after twice as many"
    )


def growth(series: Series) -> float | None:
    """Growth of the values a step, over the second half of the run, by least squares; None where they do not grow
    steadily.

    The first half has what a run allocates as it begins.
    """
    steps, values = series.steps[len(series) // 2 :].astype(float), series.values[len(series) // 2 :]
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if len(values) < FEWEST or values.std() == 0:
        return None
    slope, _ = np.polyfit(steps, values, 1)
    explained = np.corrcoef(steps, values)[0, 1] ** 2
    grown = slope * (steps[-1] - steps[0])
    return float(slope) if explained >= STEADY and grown >= GROWTH * values.mean() else None


def slowest(status: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The rank that waited least for others, where they waited clearly more: it delays them."""
    waits = [(_waited(entry), entry) for entry in status if "communication" in entry.get("parts", {})]
    if len(waits) < 2:
        return None
    least, most = (choose(share for share, _ in waits) for choose in (min, max))
    return next(entry for share, entry in waits if share == least) if most - least >= WAITS_MORE else None


def _waited(entry: Mapping[str, Any]) -> float:
    """Waiting for others as a part of the time of steps and of waiting."""
    parts = {part: seconds for part, seconds in entry["parts"].items() if part not in ("start", "load", "data")}
    return parts["communication"] / (sum(parts.values()) or 1.0)
