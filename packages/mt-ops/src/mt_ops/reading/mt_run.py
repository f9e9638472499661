"""The run directory of mt: metrics.jsonl, events.jsonl, configuration, environment, status of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mt_core.run_events import EVENTS_FILE
from mt_ops.reading.columns import Columns
from mt_ops.reading.json_lines import JsonLines, read_json
from mt_ops.reading.run import Run, Series

METRICS, CONFIG, ORIGINS = "metrics.jsonl", "config.json", "config-origins.json"
ENVIRONMENT, STATUS, EXPERTS = "environment.json", "status", "expert-load.jsonl"
NOT_SERIES = ("time", "elapsed", "consumed_samples", "kind")


class MtRunReader:
    """Reads a run directory, and again what was added to it. A run that resumes replaces metrics.jsonl: the reader
    then begins again."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path, self.name = path, name or path.resolve().name
        self._metrics, self._events = JsonLines(path / METRICS), JsonLines(path / EVENTS_FILE)
        self._experts = JsonLines(path / EXPERTS)
        self._loads: dict[int, dict[int, Sequence[float]]] = {}
        self._entries: list[Mapping[str, Any]] = []
        self._restart()

    def read(self) -> Run:
        restarts = self._metrics.restarts
        self._metrics.look()
        if self._metrics.restarts > restarts:
            self._restart()
        for line in self._metrics.new():
            self._add(line)
        self._entries += [entry for entry in self._events.new() if "kind" in entry and "iteration" in entry]
        for line in self._experts.new():
            self._add_loads(line)
        config = dict(_flat(read_json(self.path / CONFIG) or {}))
        train, parts = self._train.series(), self._parts.series()
        axes = _axes(train, config)
        return Run(
            name=self.name,
            path=self.path,
            source="mt",
            series={
                **{name: series for name, series in train.items() if name not in NOT_SERIES},
                **{name: series for name, series in self._valid.series().items() if name not in NOT_SERIES},
                **{f"parts/{name}": series for name, series in parts.items()},
            },
            axes=axes,
            config=config,
            origins=read_json(self.path / ORIGINS) or {},
            environment=read_json(self.path / ENVIRONMENT) or {},
            events=list(self._entries),
            status=read_status(self.path),
            experts=self._loads,
            missing=[name for name in (METRICS, EVENTS_FILE, CONFIG, ENVIRONMENT) if not (self.path / name).exists()],
        )

    def _restart(self) -> None:
        self._train, self._valid, self._parts = Columns(), Columns(), Columns()

    def _add_loads(self, line: Mapping[str, Any]) -> None:
        for layer, loads in line["layers"].items():
            of_layer = self._loads.setdefault(int(layer), {})
            # A process that began again before these steps takes other ones.
            for step in [step for step in of_layer if step >= line["iteration"]]:
                del of_layer[step]
            of_layer[line["iteration"]] = loads

    def _add(self, line: dict[str, Any]) -> None:
        if "iteration" not in line:
            return
        if line.get("kind") == "valid":
            self._valid.add(line)
            return
        parts = line.pop("parts", None)
        self._train.add(line)
        if isinstance(parts, Mapping):
            self._parts.add({"iteration": line["iteration"], **parts})


def read_status(path: Path) -> list[Mapping[str, Any]]:
    """Status of the ranks, in their order."""
    entries = [read_json(file) for file in (path / STATUS).glob("rank-*.json")]
    return sorted((entry for entry in entries if isinstance(entry, Mapping)), key=lambda entry: entry.get("rank", 0))


def is_mt_run(path: Path) -> bool:
    return path.is_dir() and ((path / METRICS).exists() or (path / CONFIG).exists())


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _axes(train: Mapping[str, Series], config: Mapping[str, Any]) -> dict[str, Series]:
    axes = {}
    samples, length = train.get("consumed_samples"), config.get("data.seq_length")
    if samples is not None:
        axes["samples"] = samples
        if isinstance(length, int):
            axes["tokens"] = Series(samples.steps, samples.values * length)
    if "elapsed" in train:
        axes["time"] = Series(train["elapsed"].steps, accumulated(train["elapsed"].values))
    elif "iteration_time" in train:
        seconds = train["iteration_time"]
        axes["time"] = Series(seconds.steps, np.cumsum(np.nan_to_num(seconds.values) * _between(seconds)))
    if "time" in train:
        axes["clock"] = train["time"]
    return axes


def accumulated(elapsed: Any) -> Any:
    """elapsed: [n] seconds of each process since its beginning. Returns seconds over all processes."""
    drops = np.flatnonzero(np.diff(elapsed) < 0) + 1
    total = elapsed.copy()
    for place in drops:
        total[place:] += elapsed[place - 1]
    return total


def _between(series: Series) -> Any:
    """Steps since the value before."""
    return np.diff(series.steps, prepend=0)
