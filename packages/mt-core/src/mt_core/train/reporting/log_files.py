"""log.txt: what the console shows in plain mode, and warnings, with times."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from mt_core.config.schema import Config
from mt_core.train.callbacks import Callback, Metrics, Run
from mt_core.train.checkpoint.run_directory import LOG_FILE, METRICS_FILE
from mt_core.train.reporting.log_lines import LogLines, log_lines, stamped
from mt_core.train.state import TrainResult


class LogFile(Callback):
    """Appends to log.txt in the run directory; without a run directory it writes nothing."""

    def __init__(self, lines: LogLines) -> None:
        self._lines = lines
        self._file: TextIO | None = None
        # Messages of the time before training starts, when the run directory need not exist; None from then on.
        self._early: list[str] | None = []

    def on_message(self, run: Run, text: str) -> None:
        self._write(stamped(text))

    def on_warning(self, run: Run, text: str) -> None:
        self._write(stamped(f"warning: {text}"))

    def on_train_start(self, run: Run) -> None:
        early, self._early = self._early or [], None
        if run.directory is not None:
            self._file = (run.directory.path / LOG_FILE).open("a", encoding="utf-8")
            for line in early:
                self._write(line)

    def on_log(self, run: Run, metrics: Metrics) -> None:
        self._write(self._lines.step(metrics, run.last_iteration))

    def on_evaluation(self, run: Run, metrics: Metrics) -> None:
        self._write(self._lines.evaluation(metrics))

    def on_checkpoint(self, run: Run, path: Path) -> None:
        self._write(stamped(f"saved {path.name}"))

    def on_train_end(self, run: Run, result: TrainResult) -> None:
        self._write(stamped(f"stopped by {result.stopped}" if result.stopped else "finished"))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: str) -> None:
        if self._file is not None:
            self._file.write(f"{line}\n")
            self._file.flush()
        elif self._early is not None:
            self._early.append(line)


def build_log_file(config: Config) -> LogFile:
    return LogFile(log_lines(config.logging))


# metrics.jsonl: one JSON object a line, for steps (`"kind": "train"`) and evaluations (`"kind": "valid"`), with the
# time since the epoch, the seconds since this process began to train (`elapsed`), and those of each part of the time
# since the last line (`parts`, of rank 0).


class MetricsJsonl(Callback):
    """Appends to metrics.jsonl in the run directory; without a run directory it writes nothing."""

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._began = time.time()
        self._parts: Mapping[str, float] = {}

    def on_train_start(self, run: Run) -> None:
        self._began, self._parts = time.time(), run.engine.time.totals()
        if run.directory is not None:
            path = run.directory.path / METRICS_FILE
            drop_after(path, run.state.iteration)
            self._file = path.open("a", encoding="utf-8")

    def on_log(self, run: Run, metrics: Metrics) -> None:
        before, self._parts = self._parts, run.engine.time.totals()
        parts = {part: round(seconds - before.get(part, 0.0), 6) for part, seconds in self._parts.items()}
        self._write("train", {**metrics, "parts": {part: seconds for part, seconds in parts.items() if seconds > 0}})

    def on_evaluation(self, run: Run, metrics: Metrics) -> None:
        self._write("valid", metrics)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, kind: str, metrics: Mapping[str, Any]) -> None:
        if self._file is not None:
            now = time.time()
            line = {"kind": kind, **metrics, "time": round(now, 3), "elapsed": round(now - self._began, 3)}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def drop_after(path: Path, iteration: int) -> None:
    """Remove the lines of steps after `iteration`: a resumed run repeats those steps."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    # Incomplete lines are dropped too: the next append would continue them.
    kept = [line for line in lines if _iteration(line) is not None and (_iteration(line) or 0) <= iteration]
    if len(kept) < len(lines):
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def _iteration(line: str) -> int | None:
    """None for an incomplete line, left when the process was killed."""
    try:
        return int(json.loads(line)["iteration"])
    except (ValueError, KeyError, TypeError):
        return None


def build_metrics_jsonl(config: Config) -> MetricsJsonl:
    return MetricsJsonl()
