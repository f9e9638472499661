"""One line a run: how far it came, how good, how fast, what state it is in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

from mt_core.run_events import account
from mt_core.run_state import RunState, run_state
from mt_ops.reading.run import Run
from mt_ops.report.findings import findings
from mt_ops.report.html import Html, Section, duration, finding, note, table

MOST_NOTES = 8


def overview(runs: Sequence[Run]) -> Section:
    headers = [
        *("run", "written by", "steps", "tokens", "last loss", "best validation loss", "resumes"),
        *("time of training", "effective", "state"),
    ]
    body = table(headers, [_row(run) for run in runs])
    wrong = [f"{run.name}: {text}" for run in runs for text in findings(run)]
    absent = [f"{run.name}: not there: {', '.join(run.missing)}" for run in runs if run.missing]
    notes = [*map(finding, wrong[:MOST_NOTES]), *map(note, dict.fromkeys(absent[:MOST_NOTES]))]
    return Section("overview", "Overview", body + "".join(notes))


def _row(run: Run) -> list[object]:
    best = run.series["valid_loss"].smallest if "valid_loss" in run.series else None
    tokens = run.axes["tokens"].last if "tokens" in run.axes else None
    seconds = run.axes["time"].last if "time" in run.axes else None
    times = account(run.events, run.status)
    return [
        Html(f'<span class="swatch" data-run="{escape(run.name)}"></span>{escape(run.name)}'),
        run.source,
        run.last_step,
        None if tokens is None else int(tokens),
        run.series["loss"].last if "loss" in run.series else None,
        None if best is None else f"{best[1]:.6g} at step {best[0]:,}",
        len(run.resumes),
        duration(seconds),
        None if times is None else f"{times.effective:.1%}",
        state_of(run, time.time()),
    ]


def state_of(run: Run, now: float) -> str:
    """ "finished", "stopped by signal", "training", "silent for 0:10:02", or "" where nothing says it."""
    return state(run, now).text(now)


def state(run: Run, now: float) -> RunState:
    clock = run.axes.get("clock")
    return run_state(run.events, run.status, now, None if clock is None else clock.last, run.seconds_per_step)
