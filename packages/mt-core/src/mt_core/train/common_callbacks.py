"""Callbacks of mt-core that follow the run: an early stop, and the memory of the processes."""

from __future__ import annotations

import math
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mt_core.config.schema import Config
from mt_core.train.callbacks import Callback, Metrics, Run

DEFAULT_METRIC = "valid_loss"
STATUS = Path("/proc/self/statm")
"""Sizes of this process in pages; the second is what is resident."""


class EarlyStop(Callback):
    """Stops a run whose metric has not improved in `patience` evaluations. A resumed run continues the count."""

    def __init__(self, metric: str, patience: int, min_delta: float) -> None:
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.best, self.evaluations = math.inf, 0

    def on_evaluation(self, run: Run, metrics: Metrics) -> None:
        if self.metric not in metrics:
            return
        value = float(metrics[self.metric])
        # Losses, whose lower values are better, end with this word; other metrics are better where they are higher.
        value = value if self.metric.endswith("loss") else -value
        if value < self.best - self.min_delta:
            self.best, self.evaluations = value, 0
            return
        self.evaluations += 1
        if self.evaluations >= self.patience:
            run.stop(f"{self.metric} has not improved in {self.evaluations} evaluations (train.early_stop_patience)")

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.metric, "best": self.best, "evaluations": self.evaluations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # Another metric begins anew.
        if state["metric"] == self.metric:
            self.best, self.evaluations = float(state["best"]), int(state["evaluations"])


def build_early_stop(config: Config) -> Callback:
    """Does nothing without train.early_stop_patience."""
    train = config.train
    if train.early_stop_patience is None:
        return Callback()
    return EarlyStop(train.early_stop_metric or DEFAULT_METRIC, train.early_stop_patience, train.early_stop_min_delta)


class HostMemory(Callback):
    """Records `host_memory_gb`: GiB that are resident, of the process that has most of all ranks."""

    def on_step_end(self, run: Run, metrics: Metrics) -> None:
        run.record("host_memory_gb", resident_bytes() / 2**30, "max")


def resident_bytes() -> int:
    """Memory of this process; its peak where the system does not say what it is now."""
    try:
        return int(STATUS.read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def build_host_memory(config: Config) -> Callback:
    return HostMemory()
