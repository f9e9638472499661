"""What happened in the runs: events, evaluations, generated samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    return list(told_events(run))


def told_events(run: Run) -> Iterator[Mapping[str, Any]]:
    """Those of the list. A request of mt ctl is a message of the log too, and listed once."""
    before: Mapping[str, Any] = {}
    for entry in run.events:
        repeats = before.get("kind") == "control" and entry["kind"] == "message" and entry["text"].startswith("mt ctl ")
        before = entry
        if entry["kind"] not in NO_EVENTS and not repeats:
            yield entry


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
    if entry["kind"] == "control":
        argument = f" {entry['argument']}" if entry.get("argument") else ""
        refused = "" if entry.get("ok", True) else "refused: "
        return f"mt ctl {entry.get('command')}{argument} by {entry.get('by')}: {refused}{entry.get('answer')}"
    hidden = ("time", "iteration", "kind", "began", "before", "data", "files")
    values = {key: value for key, value in entry.items() if key not in hidden and value is not None}
    return ", ".join(f"{key.replace('_', ' ')} {shown(value)}" for key, value in values.items())


def evaluations(runs: Sequence[Run]) -> Section | None:
    """A row for each evaluation of each run, with all metrics of validation sets and of evaluators."""
    parts = [_evaluations_of(run, evaluated, len(runs) == 1) for run in runs if (evaluated := _evaluated(run))]
    return Section("evaluations", "Evaluations", "".join(parts)) if parts else None


def _evaluated(run: Run) -> dict[int, dict[str, Any]]:
    """Step -> time and metrics. A step that a later process took again has what that one measured."""
    by_step: dict[int, dict[str, Any]] = {}
    for entry in run.events:
        step = entry["iteration"]
        if entry["kind"] == "start":
            by_step = {earlier: values for earlier, values in by_step.items() if earlier <= step}
        elif entry["kind"] == "evaluation" and "values" in entry:
            by_step.setdefault(step, {}).update({**entry["values"], "time": entry["time"]})
    return by_step


def _evaluations_of(run: Run, by_step: Mapping[int, Mapping[str, Any]], is_open: bool) -> str:
    hidden = ("iteration", "time")
    names = list(dict.fromkeys(name for values in by_step.values() for name in values if name not in hidden))
    kept = sorted(by_step)[-MOST_EVENTS:]
    rows = [[step, clock_time(by_step[step]["time"]), *(by_step[step].get(name) for name in names)] for step in kept]
    rest = note(f"{len(by_step) - len(kept)} earlier ones are in events.jsonl.") if len(kept) < len(by_step) else ""
    return details(
        f"{run.name}: {len(by_step)} evaluations", table(["step", "time", *names], rows) + rest, is_open=is_open
    )


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
