"""A callback that writes losses.csv: one line a step, none twice when a run is resumed."""

from __future__ import annotations

import csv
from pathlib import Path

from mt_core.config import Config
from mt_core.train import Callback, Metrics, Run

FILE = "losses.csv"
COLUMNS = ("iteration", "loss", "learning_rate")


class LossCsv(Callback):
    """Keeps the lines of steps that the run's checkpoint has, and appends to them."""

    def __init__(self) -> None:
        self._path: Path | None = None

    def on_train_start(self, run: Run) -> None:
        if run.directory is None:
            return
        self._path = run.directory.path / FILE
        kept = lines_up_to(self._path, run.state.iteration)
        with self._path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([COLUMNS, *kept])

    def on_step_end(self, run: Run, metrics: Metrics) -> None:
        if self._path is not None:
            with self._path.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerow([metrics[column] for column in COLUMNS])


def lines_up_to(path: Path, iteration: int) -> list[list[str]]:
    """Lines of the steps up to `iteration`, without the header; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))[1:]
    return [line for line in lines if len(line) == len(COLUMNS) and int(line[0]) <= iteration]


def build_loss_csv(config: Config) -> LossCsv:
    return LossCsv()
