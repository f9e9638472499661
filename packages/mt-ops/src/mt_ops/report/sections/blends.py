"""The data that a run was told to draw from, and how much of it each part has given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mt_ops.reading.data_contents import changed_since
from mt_ops.reading.run import Run
from mt_ops.report.html import Section, details, finding, table

MOST_CHECKED, MOST_LINES = 12, 24
"""Runs whose files are looked at, and lines about them."""


@dataclass(frozen=True)
class Drawn:
    """weight: the planned part of all samples. samples, tokens: what was drawn."""

    name: str
    weight: float
    samples: int
    tokens: int


def drawn_data(runs: Sequence[Run]) -> Section | None:
    """Planned and drawn parts of the data sets of a blend, and files that are no longer what a run was trained on."""
    changed = [line for run in runs[:MOST_CHECKED] for line in changed_since(run)]
    parts = [details(run.name, _table(drawn), is_open=len(runs) == 1) for run in runs if (drawn := drawn_by(run))]
    title = "Data drawn from the blend" if parts else "Data"
    parts = [*map(finding, changed[:MOST_LINES]), *parts]
    return Section("blend", title, "".join(parts)) if parts else None


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
