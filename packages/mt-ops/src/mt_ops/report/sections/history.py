"""What happened in the runs: events, evaluations, generated samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mt_ops.reading.run import Run
from mt_ops.report.html import Section, clock_time, details, note, shown, table

MOST_EVENTS = 400
"""Events of a run in the table: the last ones. All warnings are kept."""
MOST_SAMPLES = 30
NO_EVENTS = ("parts", "evaluation", "sample", "data", "memory_plan")
"""Kinds that stand in other sections."""


def events(runs: Sequence[Run]) -> Section | None:
    parts = [_events_of(run, len(runs) == 1) for run in runs if _told(run)]
    return Section("events", "Events", "".join(parts)) if parts else None


def _told(run: Run) -> list[Mapping[str, Any]]:
    return [entry for entry in run.events if entry["kind"] not in NO_EVENTS]


def _events_of(run: Run, is_open: bool) -> str:
    told = _told(run)
    cut = len(told) - MOST_EVENTS
    kept = [entry for place, entry in enumerate(told) if place >= cut or entry["kind"] == "warning"]
    rows = [[clock_time(entry["time"]), entry["iteration"], entry["kind"], described(entry)] for entry in kept]
    warnings = sum(entry["kind"] == "warning" for entry in told)
    title = f"{run.name}: {len(told)} events" + (f", {warnings} of them warnings" if warnings else "")
    rest = note(f"{len(told) - len(kept)} earlier ones are in events.jsonl.") if len(kept) < len(told) else ""
    return details(title, table(["time", "step", "kind", "what"], rows) + rest, is_open=is_open)


def described(entry: Mapping[str, Any]) -> str:
    """An event in words."""
    if "text" in entry:
        return str(entry["text"])
    if entry["kind"] == "end":
        return f"stopped by {entry['reason']}" if entry.get("reason") else "finished"
    hidden = ("time", "iteration", "kind", "began", "before", "data", "files")
    values = {key: value for key, value in entry.items() if key not in hidden and value is not None}
    return ", ".join(f"{key.replace('_', ' ')} {shown(value)}" for key, value in values.items())


def evaluations(runs: Sequence[Run]) -> Section | None:
    """The last evaluation of each run, of all metrics of validation sets."""
    rows = [[run.name, entry["iteration"], name, value] for run in runs for entry in _last(run) for name, value in
            entry["values"].items() if name != "iteration"]  # fmt: skip
    if not rows:
        return None
    return Section("evaluations", "Evaluations", table(["run", "step", "metric", "value"], rows[:MOST_EVENTS]))


def _last(run: Run) -> list[Mapping[str, Any]]:
    return [entry for entry in run.events if entry["kind"] == "evaluation" and "values" in entry][-1:]


def samples(runs: Sequence[Run]) -> Section | None:
    """Generated texts, the last ones of each run."""
    parts = [_samples_of(run) for run in runs if run.samples()]
    return Section("samples", "Generated while training", "".join(parts)) if parts else None


def _samples_of(run: Run) -> str:
    texts = run.samples()[-MOST_SAMPLES:]
    blocks = "".join(map(_sample, reversed(texts)))
    return details(f"{run.name}: {len(texts)} texts", blocks, is_open=True)


def _sample(entry: Mapping[str, Any]) -> str:
    prompt, text = escape(str(entry.get("prompt", ""))), escape(str(entry.get("text", "")))
    return f"<figure><figcaption>step {entry['iteration']:,}</figcaption><pre><b>{prompt}</b>{text}</pre></figure>"
