"""The data that a run was told to draw from, and how much of it each part has given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mt_ops.reading.run import Run
from mt_ops.report.html import Section, details, table


@dataclass(frozen=True)
class Drawn:
    """weight: the planned part of all samples. samples, tokens: what was drawn."""

    name: str
    weight: float
    samples: int
    tokens: int


def drawn_data(runs: Sequence[Run]) -> Section | None:
    """Planned and drawn parts of the data sets of a blend."""
    parts = [details(run.name, _table(drawn), is_open=len(runs) == 1) for run in runs if (drawn := drawn_by(run))]
    return Section("blend", "Data drawn from the blend", "".join(parts)) if parts else None


def drawn_by(run: Run) -> list[Drawn]:
    """Over all processes of the run; what a later process drew again counts once. [] without a blend."""
    total: dict[str, Drawn] = {}
    for entry in _last_counts(run.events):
        for part in entry["datasets"]:
            name, samples, tokens = str(part["name"]), int(part["samples"]), int(part.get("tokens", 0))
            before = total.get(name, Drawn(name, 0.0, 0, 0))
            total[name] = Drawn(name, float(part["weight"]), before.samples + samples, before.tokens + tokens)
    return list(total.values())


def _last_counts(events: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The last event of kind `data` of each process, before the step at which the next one went on."""
    starts = [place for place, entry in enumerate(events) if entry["kind"] == "start"]
    for begin, end in pairwise([*starts, len(events)]):
        until = events[end]["iteration"] if end < len(events) else None
        counts = [
            entry
            for entry in events[begin:end]
            if entry["kind"] == "data" and "datasets" in entry and (until is None or entry["iteration"] <= until)
        ]
        yield from counts[-1:]


def _table(drawn: Sequence[Drawn]) -> str:
    samples, weights = sum(part.samples for part in drawn) or 1, sum(part.weight for part in drawn) or 1.0
    rows = [
        [part.name, f"{part.weight / weights:.3%}", f"{part.samples / samples:.3%}", part.samples, part.tokens]
        for part in drawn
    ]
    return table(["data set", "planned", "drawn", "samples", "tokens"], rows)
