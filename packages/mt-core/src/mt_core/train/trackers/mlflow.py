"""Runs of MLflow, on a server or in a local store."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from mt_core.config.schema import Config
from mt_core.train.trackers.tracker import TrackedRun, Tracker, require_package

LONGEST_PARAM = 500
"""Characters of a parameter's value that all of MLflow's stores take."""
PARAMS_OF_A_CALL = 100
PENDING = 1000
"""Newest calls whose failure is noticed as the run closes."""


class MlflowWriter:
    """Metrics are sent by a thread of MLflow's; those that could not be are reported as the run closes."""

    def __init__(self, run: TrackedRun) -> None:
        import mlflow

        options = run.options
        if options.mlflow_tracking_uri is not None:
            mlflow.set_tracking_uri(options.mlflow_tracking_uri)
        if options.mlflow_experiment is not None:
            mlflow.set_experiment(options.mlflow_experiment)
        self._client = mlflow.MlflowClient()
        self._pending: deque[Any] = deque(maxlen=PENDING)
        self.native = mlflow.start_run(run_id=run.run_id, run_name=options.mlflow_run_name or run.name)
        self.run_id = str(self.native.info.run_id)
        # MLflow refuses to change the parameters of a run.
        if run.run_id is None:
            self._write_params(dict(_flattened(run.config)))

    def _write_params(self, values: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        params = [Param(key, value[:LONGEST_PARAM]) for key, value in values.items()]
        for first in range(0, len(params), PARAMS_OF_A_CALL):
            self._client.log_batch(self.run_id, params=params[first : first + PARAMS_OF_A_CALL])

    def write(self, values: Mapping[str, float], iteration: int, samples: int) -> None:
        from mlflow.entities import Metric

        # Milliseconds since the epoch.
        now = int(time.time() * 1000)
        points = {**values, "consumed-samples": float(samples)}
        metrics = [Metric(name, value, now, iteration) for name, value in points.items()]
        self._pending.append(self._client.log_batch(self.run_id, metrics=metrics, synchronous=False))

    def close(self, *, finished: bool) -> None:
        import mlflow

        try:
            for sent in self._pending:
                sent.wait()
        finally:
            mlflow.end_run("FINISHED" if finished else "FAILED")


def _flattened(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(section.key, value) of all values, tables in sections included."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def build_mlflow(config: Config) -> Tracker:
    require_package("mlflow", "mlflow")
    return Tracker("mlflow", MlflowWriter, config)
