"""log.txt: what the console shows in plain mode, with times."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TextIO

from mt_core.config.schema import Config
from mt_core.train.callbacks import Callback, Metrics, Run
from mt_core.train.checkpoint.run_directory import LOG_FILE
from mt_core.train.state import TrainResult


def step_line(metrics: Metrics, last_iteration: int) -> str:
    """One line about a step: `step 20/300 | loss 3.4652 | grad norm 0.95 | lr 2.9e-03 | 11,200 tokens/s`."""
    parts = [
        f"step {metrics['iteration']}/{last_iteration}",
        f"loss {metrics['loss']:.4f}",
        f"grad norm {metrics['grad_norm']:.3f}",
        f"lr {metrics['learning_rate']:.2e}",
        f"{metrics['tokens_per_second']:,.0f} tokens/s",
    ]
    if metrics["skipped_iterations"]:
        parts.append(f"loss scale {metrics['loss_scale']:g}, {metrics['skipped_iterations']} skipped")
    return " | ".join(parts)


def evaluation_line(metrics: Metrics) -> str:
    losses = [
        f"{name.removesuffix('_loss')} loss {value:.4f}" for name, value in metrics.items() if name != "iteration"
    ]
    return f"step {metrics['iteration']} | {' | '.join(losses)}"


class LogFile(Callback):
    """Appends to log.txt in the run directory; without a run directory it writes nothing."""

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._early: list[str] = []

    def on_message(self, run: Run, text: str) -> None:
        self._write(text)

    def on_train_start(self, run: Run) -> None:
        if run.directory is not None:
            self._file = (run.directory.path / LOG_FILE).open("a", encoding="utf-8")
            early, self._early = self._early, []
            for text in early:
                self._write(text)

    def on_log(self, run: Run, metrics: Metrics) -> None:
        self._write(step_line(metrics, run.last_iteration))

    def on_evaluation(self, run: Run, metrics: Metrics) -> None:
        self._write(evaluation_line(metrics))

    def on_checkpoint(self, run: Run, path: Path) -> None:
        self._write(f"saved {path.name}")

    def on_train_end(self, run: Run, result: TrainResult) -> None:
        self._write(f"stopped by {result.stopped}" if result.stopped else "finished")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, text: str) -> None:
        if self._file is None:
            self._early.append(text)
            return
        self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        self._file.flush()


def build_log_file(config: Config) -> LogFile:
    return LogFile()
