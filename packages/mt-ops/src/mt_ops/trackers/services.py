"""Writers of the trackers: MLflow, Comet, TensorBoard, trackio, Weights & Biases."""

from __future__ import annotations

import json
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.train.tracker import TrackedRun, Tracker, require_package
from mt_ops.trackers.config import CometConfig, MlflowConfig, TensorBoardConfig, TrackioConfig, WandbConfig

LONGEST_PARAM = 500
"""Characters of a parameter's value that all of MLflow's stores take."""
PARAMS_OF_A_CALL = 100
PENDING = 1000
"""Newest calls whose failure is noticed as the run closes."""


class MlflowWriter:
    """Metrics are sent by a thread of MLflow's; those that could not be are reported as the run closes."""

    def __init__(self, options: MlflowConfig, run: TrackedRun) -> None:
        import mlflow

        if options.tracking_uri is not None:
            mlflow.set_tracking_uri(options.tracking_uri)
        if options.experiment is not None:
            mlflow.set_experiment(options.experiment)
        self._client = mlflow.MlflowClient()
        self._pending: deque[Any] = deque(maxlen=PENDING)
        self.native = mlflow.start_run(run_id=run.run_id, run_name=options.run_name or run.name)
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
    return Tracker("mlflow", partial(MlflowWriter, config.section(MlflowConfig)), config)


# -- Comet -------------------------------------------------------------------------------------------


class CometWriter:
    """COMET_START_ONLINE=0 writes archives, which `comet upload` sends later."""

    def __init__(self, options: CometConfig, run: TrackedRun) -> None:
        import comet_ml

        self.native = comet_ml.start(
            workspace=options.workspace,
            project=options.project,
            experiment_key=run.run_id,
            experiment_config=comet_ml.ExperimentConfig(
                name=options.experiment_name or run.name,
                # Console output, source code and the git state stay on this machine.
                auto_output_logging=False,
                log_code=False,
                log_git_metadata=False,
                log_git_patch=False,
            ),
        )
        self.native.log_parameters(dict(run.config))

    @property
    def run_id(self) -> str:
        return str(self.native.get_key())

    def write(self, values: Mapping[str, float], iteration: int, samples: int) -> None:
        self.native.log_metrics({**values, "consumed-samples": samples}, step=iteration)

    def close(self, *, finished: bool) -> None:
        self.native.end()


def build_comet(config: Config) -> Tracker:
    require_package("comet_ml", "comet")
    return Tracker("comet", partial(CometWriter, config.section(CometConfig)), config)


# -- TensorBoard -------------------------------------------------------------------------------------

FOLDER = "tensorboard"


class TensorBoardWriter:
    """Writes every series over consumed samples, too (`lm loss vs samples`), as Megatron does."""

    run_id = None

    def __init__(self, options: TensorBoardConfig, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.native = SummaryWriter(_folder(options, run), max_queue=options.queue_size)
        self.native.add_text("config", f"```\n{json.dumps(run.config, indent=2)}\n```", run.iteration)

    def write(self, values: Mapping[str, float], iteration: int, samples: int) -> None:
        for name, value in values.items():
            self.native.add_scalar(name, value, iteration)
            self.native.add_scalar(f"{name} vs samples", value, samples)

    def close(self, *, finished: bool) -> None:
        self.native.close()


def _folder(options: TensorBoardConfig, run: TrackedRun) -> str:
    if options.dir is not None:
        return options.dir
    if run.folder is None:
        raise ConfigError("logging.trackers: tensorboard needs a run directory, or tensorboard.dir")
    return str(run.folder / FOLDER)


def build_tensorboard(config: Config) -> Tracker:
    require_package("tensorboard", "tensorboard")
    return Tracker("tensorboard", partial(TensorBoardWriter, config.section(TensorBoardConfig)), config)


# -- trackio -----------------------------------------------------------------------------------------


class TrackioWriter:
    """Writes to a local database (TRACKIO_DIR). trackio identifies a run by its name."""

    def __init__(self, options: TrackioConfig, run: TrackedRun) -> None:
        import trackio

        wanted = options.name or run.name or "mt"
        # Random digits keep the runs of equally named directories apart.
        self.run_id = run.run_id or f"{wanted}-{uuid.uuid4().hex[:6]}"
        self.native = trackio.init(
            project=options.project,
            name=self.run_id,
            config=dict(run.config),
            resume="allow" if run.run_id is not None else "never",
            embed=False,
        )

    def write(self, values: Mapping[str, float], iteration: int, samples: int) -> None:
        self.native.log({**values, "consumed-samples": samples}, step=iteration)

    def close(self, *, finished: bool) -> None:
        self.native.finish()


def build_trackio(config: Config) -> Tracker:
    require_package("trackio", "trackio")
    return Tracker("trackio", partial(TrackioWriter, config.section(TrackioConfig)), config)


# -- Weights & Biases --------------------------------------------------------------------------------


class WandbWriter:
    """WANDB_MODE=offline writes files that `wandb sync` sends later."""

    def __init__(self, options: WandbConfig, run: TrackedRun) -> None:
        import wandb

        self.native = wandb.init(
            project=options.project,
            entity=options.entity,
            name=options.exp_name or run.name,
            dir=options.save_dir or (str(run.folder) if run.folder is not None else None),
            config=dict(run.config),
            id=run.run_id,
            resume="allow" if run.run_id is not None else None,
        )

    @property
    def run_id(self) -> str:
        return str(self.native.id)

    def write(self, values: Mapping[str, float], iteration: int, samples: int) -> None:
        self.native.log({**values, "consumed-samples": samples}, step=iteration)

    def close(self, *, finished: bool) -> None:
        self.native.finish(exit_code=0 if finished else 1)


def build_wandb(config: Config) -> Tracker:
    require_package("wandb", "wandb")
    return Tracker("wandb", partial(WandbWriter, config.section(WandbConfig)), config)
