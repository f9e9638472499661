"""`Tracker`: a callback that gives metrics, under Megatron's names, to a writer of one program."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from mt_core.config.metrics import configured_loss
from mt_core.config.schema import Config
from mt_core.errors import PluginError
from mt_core.paths import write_whole
from mt_core.train.callbacks import Callback, Metrics, Run
from mt_core.train.reporting.log_lines import loss_name, perplexity
from mt_core.train.state import TrainResult

# -- names of metrics: those of Megatron-LM, where it has one ----------------------------------------

AXES = ("iteration", "consumed_samples")
OF_STEP: Mapping[str, str] = {
    "loss": "lm loss",
    "learning_rate": "learning-rate",
    "grad_norm": "grad-norm",
    "loss_scale": "loss-scale",
    "global_batch_size": "batch-size",
    "zeros_in_grad": "num-zeros",
    "skipped_iterations": "skipped-iterations",
}
OF_LOG: Mapping[str, str] = {
    "iteration_time": "iteration-time",
    "tflops": "throughput",
    "mfu": "mfu",
    "params_norm": "params-norm",
    "tokens_per_second": "tokens-per-second",
    "samples_per_second": "samples-per-second",
    "memory_reserved": "mem-reserved-bytes",
    "memory_allocated": "mem-allocated-bytes",
    "max_memory_allocated": "mem-max-allocated-bytes",
}
"""Means since the last line of the log, memory, and the norm of the parameters."""
OF_LOG_ONLY = {*OF_LOG, "skipped_since_log"}


def step_values(metrics: Metrics) -> dict[str, float]:
    """Values to track of `on_step_end`: what a step has, and what layers added to its loss."""
    left_out = {*AXES, *OF_LOG_ONLY}
    return {OF_STEP.get(key, key): float(value) for key, value in metrics.items() if key not in left_out}


def log_values(metrics: Metrics) -> dict[str, float]:
    """Values to track of `on_log`: speed, memory, and what layers report."""
    left_out = {*AXES, *OF_STEP, "skipped_since_log"}
    return {OF_LOG.get(key, key): float(value) for key, value in metrics.items() if key not in left_out}


def evaluation_values(metrics: Metrics, *, in_nats_per_token: bool) -> dict[str, float]:
    """Values of on_evaluation: loss and metrics of each validation set, and what evaluators measure; of a loss in nats
    per token also its perplexity."""
    values = {}
    for key, value in metrics.items():
        if key.endswith("_loss"):
            name = loss_name(key)
            values[f"{name} validation"] = float(value)
            if in_nats_per_token:
                values[f"{name} validation ppl"] = perplexity(float(value))
        elif key not in AXES:
            values[key.replace("_", " ")] = float(value)
    return values


IDS_FILE = "trackers.json"
"""In the run directory: tracker -> its id of the run, so that a resumed run is the same there."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker receives at its start.

    folder: the run directory. iteration: completed steps. run_id: of the stopped run that is resumed, else None.
    """

    config: Mapping[str, Any]
    folder: Path | None
    iteration: int
    run_id: str | None

    @property
    def name(self) -> str | None:
        """Name of the run directory."""
        return self.folder.absolute().name if self.folder is not None else None


class MetricWriter(Protocol):
    """An open run of a tracker. Its calls should not wait for a network."""

    @property
    def native(self) -> Any:
        """The package's own object of the run."""
        ...

    @property
    def run_id(self) -> str | None:
        """Under which `open` finds the run again; None for a tracker that needs none."""
        ...

    def write(self, values: Mapping[str, float], iteration: int, samples: int) -> None:
        """samples: consumed so far."""
        ...

    def close(self, *, finished: bool) -> None:
        """finished: false after an error."""
        ...


class Tracker(Callback):
    """Steps every logging.tensorboard_log_interval; times and what layers report every logging.log_interval.

    open_writer: opens a run of the program that the tracker is for.
    """

    def __init__(self, name: str, open_writer: Callable[[TrackedRun], MetricWriter], config: Config) -> None:
        self.open_writer = open_writer
        self._name, self._interval = name, config.logging.tensorboard_log_interval
        self._writer: MetricWriter | None = None
        self._finished = False

    def on_train_start(self, run: Run) -> None:
        folder = run.directory.path if run.directory is not None else None
        ids = _read_ids(folder)
        # A run that starts anew in the same directory is another run for the tracker.
        known = ids.get(self._name) if run.resumed_from is not None else None
        tracked = TrackedRun(run.config.to_dict(), folder, run.state.iteration, known)
        self._writer = self.open_writer(tracked)
        if folder is not None and self._writer.run_id is not None:
            write_whole(folder / IDS_FILE, json.dumps({**ids, self._name: self._writer.run_id}).encode())

    def on_step_end(self, run: Run, metrics: Metrics) -> None:
        if int(metrics["iteration"]) % self._interval == 0:
            self._write(step_values(metrics), metrics["iteration"], metrics["consumed_samples"])

    def on_log(self, run: Run, metrics: Metrics) -> None:
        self._write(log_values(metrics), metrics["iteration"], metrics["consumed_samples"])

    def on_evaluation(self, run: Run, metrics: Metrics) -> None:
        in_nats = configured_loss(run.config, run.host).in_nats_per_token
        values = evaluation_values(metrics, in_nats_per_token=in_nats)
        self._write(values, metrics["iteration"], run.state.consumed_samples)

    def on_train_end(self, run: Run, result: TrainResult) -> None:
        self._finished = True

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close(finished=self._finished)

    def _write(self, values: Mapping[str, float], iteration: Any, samples: Any) -> None:
        if self._writer is not None:
            self._writer.write(values, int(iteration), int(samples))


def _read_ids(folder: Path | None) -> dict[str, str]:
    if folder is None:
        return {}
    # The file of ids is not worth an error: without it the tracker opens a new run.
    try:
        ids = json.loads((folder / IDS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return ids if isinstance(ids, dict) else {}


def require_package(module: str, tracker: str) -> None:
    """Raises PluginError, saying what to install, when the tracker's package is missing."""
    if find_spec(module) is None:
        raise PluginError(
            f'logging.trackers: {tracker} needs the package {module}; pip install "mt-ops[{tracker}]", or take '
            f"{tracker} out of the list"
        )
