"""The data that a run was told to draw from, and how much of it each part has given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mt_ops.reading.run import Run
from mt_ops.report.html import Section, details, table


def drawn_data(runs: Sequence[Run]) -> Section | None:
    """Events of kind `data` have the samples drawn from each data set of a blend."""
    parts = [details(run.name, _table(drawn), is_open=len(runs) == 1) for run in runs if (drawn := _drawn(run))]
    return Section("data", "Data drawn from the blend", "".join(parts)) if parts else None


def _drawn(run: Run) -> list[Mapping[str, Any]]:
    """Of the last event that says it."""
    entries = [entry for entry in run.events if entry["kind"] == "data" and "datasets" in entry]
    return list(entries[-1]["datasets"]) if entries else []


def _table(drawn: Sequence[Mapping[str, Any]]) -> str:
    total = sum(float(entry.get("samples", 0)) for entry in drawn) or 1.0
    weights = sum(float(entry.get("weight", 0)) for entry in drawn) or 1.0
    rows = [
        [
            str(entry.get("name")),
            f"{float(entry['weight']) / weights:.3%}" if "weight" in entry else None,
            entry.get("samples"),
            f"{float(entry.get('samples', 0)) / total:.3%}",
        ]
        for entry in drawn
    ]
    return table(["data set", "weight", "samples drawn", "part of all"], rows)
