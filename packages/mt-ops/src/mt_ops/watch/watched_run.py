"""A run directory that is looked at again and again: what is read again, and what it says about the run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mt_core.errors import DataError
from mt_core.run_events import EVENTS_FILE
from mt_core.run_state import SILENT
from mt_ops.reading.mt_run import CONFIG, METRICS, STATUS, MtRunReader, is_mt_run
from mt_ops.reading.run import RECENT, Run
from mt_ops.report.findings import findings
from mt_ops.report.html import duration, size
from mt_ops.report.sections.history import described, told_events
from mt_ops.report.sections.overview import state

MOST_RANKS, MOST_EVENTS = 64, 12


class WatchedRun:
    """Raises DataError for a directory that is none of a run of mt."""

    def __init__(self, path: Path) -> None:
        if not is_mt_run(path):
            raise DataError(f"{path} is not a run directory of mt: it has neither {METRICS} nor {CONFIG}")
        self.path = path
        self._reader = MtRunReader(path)
        self._state: object = None
        self.run = self._reader.read()

    def refresh(self) -> bool:
        """Read what has changed; whether anything has."""
        state = self._files()
        if state == self._state:
            return False
        self._state, self.run = state, self._reader.read()
        return True

    def _files(self) -> list[tuple[int, int, int]]:
        status = self.path / STATUS
        paths = [self.path / name for name in (METRICS, EVENTS_FILE, CONFIG)]
        # A status file is renamed into place, which changes its folder.
        return [_signature(path) for path in [*paths, status]]


def _signature(path: Path) -> tuple[int, int, int]:
    try:
        state = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (state.st_ino, state.st_size, state.st_mtime_ns)


@dataclass(frozen=True)
class Progress:
    """seconds_per_step: over the last lines of the log. left: seconds until the last step; None where unknown."""

    step: int
    last: int | None
    seconds_per_step: float | None
    left: float | None


def progress(run: Run) -> Progress:
    last, seconds = last_step(run), run.seconds_per_step
    step = max([run.last_step, *(int(entry.get("iteration", 0)) for entry in run.status)])
    left = None if last is None or seconds is None else max(last - step, 0) * seconds
    return Progress(step, last, seconds, left)


def last_step(run: Run) -> int | None:
    """Last step of the configuration; of one that counts samples, by the batch size now."""
    iterations, samples = run.config.get("train.train_iters"), run.config.get("train.train_samples")
    if isinstance(iterations, int):
        return iterations
    batch, consumed = run.series.get("global_batch_size"), run.axes.get("samples")
    if not isinstance(samples, int) or batch is None or consumed is None or not batch.last:
        return None
    return int(consumed.steps[-1] + max(samples - (consumed.last or 0), 0) // batch.last)


def summary(run: Run, now: float | None = None) -> Iterator[str]:
    """Lines about the run: state, step, time left, loss, speed, the last checkpoint, where the time goes."""
    now = time.time() if now is None else now
    at = progress(run)
    now_is = state(run, now)
    of = "" if at.last is None else f" of {at.last:,} ({at.step / max(at.last, 1):.1%})"
    goes_on = not now_is.is_over and now_is.stall is None
    eta = f", {duration(at.left)} left" if at.left and goes_on else ""
    yield f"{run.name}: {now_is.text(now) or 'no sign of a process yet'}, step {at.step:,}{of}{eta}"
    numbers = [f"{label} {value:.5g}" for label, value in _numbers(run)]
    if numbers:
        yield ", ".join(numbers)
    yield from _checkpoint(run, now)
    yield from _time(run)
    yield from findings(run)
    silent = [str(entry.get("rank")) for entry in run.status if is_silent(entry, now)]
    if silent and not now_is.is_over:
        yield f"no sign for {SILENT:g} s of ranks {', '.join(silent[:20])}"


def is_silent(entry: Mapping[str, Any], now: float) -> bool:
    return entry.get("phase") != "ended" and now - float(entry.get("time", 0.0)) > SILENT


def _numbers(run: Run) -> Iterator[tuple[str, float]]:
    names = {
        "loss": "loss",
        "valid_loss": "validation loss",
        "learning_rate": "learning rate",
        "grad_norm": "gradient norm",
        "tokens_per_second": "tokens/s",
        "tflops": "TFLOP/s",
        "mfu": "MFU",
    }
    for name, label in names.items():
        if name in run.series and (value := run.series[name].last) is not None:
            yield label, value


def _checkpoint(run: Run, now: float) -> Iterator[str]:
    saves = [entry for entry in run.events if entry["kind"] == "save"]
    if saves:
        last = saves[-1]
        took = f", which took {duration(last['seconds'])}" if "seconds" in last else ""
        yield f"last checkpoint: step {last['iteration']:,}, {duration(now - last['time'])} ago{took}"


def _time(run: Run) -> Iterator[str]:
    """Parts of the time of the last lines of the log."""
    recent = {
        name.removeprefix("parts/"): float(np.nansum(series.values[-RECENT:]))
        for name, series in run.series.items()
        if name.startswith("parts/")
    }
    total = sum(recent.values())
    if total > 0:
        parts = sorted(recent.items(), key=lambda item: -item[1])
        shown = [
            f"{part.replace('_', ' ')} {seconds / total:.1%}" for part, seconds in parts if seconds >= 0.005 * total
        ]
        yield f"time of the last lines: {', '.join(shown)}"


RANK_COLUMNS = ("rank", "host", "step", "phase", "part", "for", "data wait", "communication", "memory", "peak")


def rank_rows(status: Sequence[Mapping[str, Any]], now: float) -> list[list[str]]:
    """Cells of RANK_COLUMNS: what each rank does, and for how long."""
    rows = []
    for entry in status[:MOST_RANKS]:
        parts = entry.get("parts", {})
        total = sum(parts.values()) or 1.0
        last_sign = " (silent)" if is_silent(entry, now) else ""
        memory = entry.get("device_memory_bytes", entry.get("memory_bytes"))
        rows.append(
            [
                str(entry.get("rank", "")),
                str(entry.get("host", "")),
                f"{entry.get('iteration', 0):,}",
                f"{entry.get('phase')}{last_sign}",
                str(entry.get("part", "")),
                duration(max(now - float(entry.get("since", now)), 0.0)),
                f"{parts.get('data_wait', 0.0) / total:.1%}",
                f"{parts.get('communication', 0.0) / total:.1%}",
                size(memory),
                size(entry.get("device_peak_bytes", entry.get("peak_bytes"))),
            ]
        )
    return rows


def event_lines(run: Run) -> list[str]:
    """The last events, the newest first."""
    told = list(told_events(run))
    return list(map(_event_line, reversed(told[-MOST_EVENTS:])))


def _event_line(entry: Mapping[str, Any]) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(entry["time"]))
    step = f"step {entry['iteration']:,} " if entry["iteration"] else ""
    return f"{clock} {step}{entry['kind']}: {described(entry)}"
