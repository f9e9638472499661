"""Callbacks of mt-core that follow the run: an early stop, and the memory of the processes."""

from __future__ import annotations

import math
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mt_core.config.metrics import require_known_metric
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.train.callbacks import Callback, Metrics, Run

DEFAULT_METRIC = "valid_loss"
STATUS = Path("/proc/self/statm")
"""Sizes of this process in pages; the second is what is resident."""


class EarlyStop(Callback):
    """Stops a run whose metric has not improved in `patience` evaluations. A resumed run continues the count."""

    def __init__(self, metric: str, patience: int, min_delta: float) -> None:
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.best, self.evaluations = math.inf, 0

    def on_train_start(self, run: Run) -> None:
        """Raises ConfigError for a metric that no validation set has, and for a run without evaluations."""
        self.metric = run.validation.full_name(self.metric)
        require_known_metric(self.metric, run.validation.names(), key="train.early_stop_metric")
        if run.config.train.eval_interval is None and run.config.train.train_epochs is None:
            raise ConfigError(
                f"train.early_stop_patience={self.patience} counts evaluations, and train.eval_interval is null; set "
                "it to the steps between them"
            )
        if self.evaluations >= self.patience:
            self._stop(run)

    def on_evaluation(self, run: Run, metrics: Metrics) -> None:
        if self.metric not in metrics:
            return
        value = float(metrics[self.metric])
        # As for checkpoint.best_metric: losses are minimized, all other metrics of validation sets maximized.
        value = value if self.metric.endswith("_loss") else -value
        if value < self.best - self.min_delta:
            self.best, self.evaluations = value, 0
            return
        self.evaluations += 1
        if self.evaluations >= self.patience:
            self._stop(run)

    def _stop(self, run: Run) -> None:
        run.stop(f"{self.metric} has not improved in {self.evaluations} evaluations (train.early_stop_patience)")

    def state_dict(self) -> dict[str, Any]:
        # JSON has no infinity, which stands for no evaluation yet.
        best = self.best if math.isfinite(self.best) else None
        return {"metric": self.metric, "best": best, "evaluations": self.evaluations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # Another metric begins anew.
        if state["metric"] == self.metric and state["best"] is not None:
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
