"""metrics.jsonl: one JSON object a line, for steps (`"kind": "train"`) and evaluations (`"kind": "valid"`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

from mt_core.config.schema import Config
from mt_core.train.callbacks import Callback, Metrics, Run
from mt_core.train.checkpoint.run_directory import METRICS_FILE


class MetricsJsonl(Callback):
    """Appends to metrics.jsonl in the run directory; without a run directory it writes nothing."""

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def on_train_start(self, run: Run) -> None:
        if run.directory is not None:
            path = run.directory.path / METRICS_FILE
            drop_after(path, run.state.iteration)
            self._file = path.open("a", encoding="utf-8")

    def on_log(self, run: Run, metrics: Metrics) -> None:
        self._write("train", metrics)

    def on_evaluation(self, run: Run, metrics: Metrics) -> None:
        self._write("valid", metrics)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, kind: str, metrics: Metrics) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind, **metrics}) + "\n")
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
