"""Trackers of a program's metrics, as in `accelerate.tracking`, on the trackers of mt; event files of the engine."""

from __future__ import annotations

import numbers
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from torch import Tensor

from mt_core.config.layers import Merged
from mt_core.config.schema import Config
from mt_core.config.sections import build_sections
from mt_core.errors import ConfigError, PluginError, Problems, did_you_mean
from mt_core.plugins import PluginHost
from mt_core.specs import CALLBACKS
from mt_core.train import Engine, StepRecord
from mt_core.train.reporting.step_metrics import StepMetrics
from mt_core.train.step.optimizer_step import StepOutcome
from mt_core.train.tracker import MetricWriter, TrackedRun, Tracker, evaluation_values, log_values, step_values


class LoggerType(StrEnum):
    """Accelerate's names of the trackers that mt has."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"


@dataclass(frozen=True)
class TrackerKeys:
    """name: the tracker's in logging.trackers, and of the section with its options. project: the key of that section
    that gets the project's name. options: keyword of init_kwargs -> key."""

    name: str
    project: str
    options: Mapping[str, str]


KEYS: Mapping[LoggerType, TrackerKeys] = {
    LoggerType.TENSORBOARD: TrackerKeys("tensorboard", "dir", {"max_queue": "queue_size"}),
    LoggerType.WANDB: TrackerKeys("wandb", "project", {"name": "exp_name", "entity": "entity", "dir": "save_dir"}),
    LoggerType.TRACKIO: TrackerKeys("trackio", "project", {"name": "name"}),
    LoggerType.COMETML: TrackerKeys("comet", "project", {"workspace": "workspace", "name": "experiment_name"}),
    LoggerType.MLFLOW: TrackerKeys("mlflow", "experiment", {"run_name": "run_name"}),
}


class GeneralTracker:
    """Base of a program's own trackers. name, tracker (the package's own object) and requires_logging_directory are
    those of Accelerate; main_process_only: its methods are called on the main process alone."""

    name: str = ""
    requires_logging_directory: bool = False
    main_process_only: bool = True

    @property
    def tracker(self) -> Any:
        """The package's own object of the run."""
        return None

    def start(self) -> None:
        """Called once by `init_trackers`."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """values: the program's configuration, once after `start`."""

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """values: metrics by name."""

    def finish(self) -> None:
        """Called by `end_training`."""


class RunTracker(GeneralTracker):
    """A tracker of mt. open_writer: opens its run; called by `start`. samples: consumed by training so far."""

    def __init__(self, name: str, open_writer: Callable[[], MetricWriter], samples: Callable[[], int]) -> None:
        self.name = name
        self._open, self._samples = open_writer, samples
        self._writer: MetricWriter | None = None

    @property
    def tracker(self) -> Any:
        """The package's own object of the run; None on processes other than the main one."""
        return self._writer.native if self._writer is not None else None

    def start(self) -> None:
        self._writer = self._open()

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """values: numbers, scalar tensors, and dictionaries of them, which become `name/key`; others are left out with
        a warning. Raises ConfigError for options."""
        if options:
            raise ConfigError(f"log_kwargs of {self.name}: {', '.join(options)} cannot be passed; leave it out")
        if self._writer is not None:
            self._writer.write(dict(_numbers(values)), step or 0, self._samples())

    def finish(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close(finished=True)


def chosen_trackers(log_with: Any, logging_dir: str | None, host: PluginHost) -> list[LoggerType | GeneralTracker]:
    """Trackers of `Accelerator(log_with=...)`: a name, a GeneralTracker, or a list of them; `all` is each whose
    package is installed. Raises ConfigError for others, and PluginError for a package that is missing."""
    requested = [] if log_with is None else list(log_with) if isinstance(log_with, list | tuple) else [log_with]
    trackers: list[LoggerType | GeneralTracker] = []
    for log_type in requested:
        named = [log_type] if isinstance(log_type, GeneralTracker) else _named(str(log_type), logging_dir, host)
        trackers += [tracker for tracker in named if tracker not in trackers]
    return trackers


def _named(name: str, logging_dir: str | None, host: PluginHost) -> Sequence[LoggerType]:
    names = [str(kind) for kind in LoggerType]
    if name not in names:
        raise ConfigError(
            f"log_with={name!r}: it can be {', '.join(names)} or a GeneralTracker{did_you_mean(name, names)}"
        )
    if name == LoggerType.ALL:
        return [kind for kind in KEYS if _is_usable(kind, logging_dir, host)]
    kind = LoggerType(name)
    if kind == LoggerType.TENSORBOARD and logging_dir is None:
        raise ConfigError("log_with='tensorboard' writes event files; give Accelerator(project_dir=...) for them")
    _build(kind, {}, host)
    return [kind]


def _is_usable(kind: LoggerType, logging_dir: str | None, host: PluginHost) -> bool:
    try:
        _build(kind, {}, host)
    except PluginError:
        return False
    return kind != LoggerType.TENSORBOARD or logging_dir is not None


def _build(kind: LoggerType, keys: Mapping[str, Any], host: PluginHost) -> Tracker:
    """keys: of the tracker's section. Trackers look at that one and at [logging] alone."""
    name = KEYS[kind].name
    spec = host[CALLBACKS].get(name, key="logging.trackers")
    values: Merged = {
        "logging": {"trackers": ([name], "the program")},
        name: {key: (value, "the program") for key, value in keys.items()},
    }
    sections: dict[str, Any] = dict(build_sections(values, values, host, Problems()))
    fields: dict[str, Any] = {"logging": sections["logging"], "brought": {name: sections[name]}}
    # Without validation of the whole: a tracker is chosen before there is a model.
    config = Config.model_construct(**fields)
    tracker: Tracker = spec.build.load()(config)
    return tracker


def build_tracker(
    kind: LoggerType,
    project_name: str,
    options: Mapping[str, Any],
    *,
    logging_dir: str | None,
    config: Mapping[str, Any],
    samples: Callable[[], int],
    host: PluginHost,
) -> RunTracker:
    """options: of init_kwargs. config: the program's configuration. Raises ConfigError for an unknown option."""
    known = KEYS[kind].options
    if unknown := sorted(set(options) - set(known)):
        raise ConfigError(
            f"init_kwargs: {kind} takes {', '.join(known)}, and no {', '.join(unknown)}; get_tracker({kind!r}, "
            "unwrap=True) is the package's own object"
        )
    folder = Path(logging_dir) if logging_dir is not None else None
    # TensorBoard's project is a folder, of other trackers a name.
    project = str((folder or Path()) / project_name) if kind == LoggerType.TENSORBOARD else project_name
    keys = {KEYS[kind].project: project, **{known[name]: value for name, value in options.items()}}
    tracker = _build(kind, keys, host)
    run = TrackedRun(config, folder, iteration=0, run_id=None)
    return RunTracker(str(kind), lambda: tracker.open_writer(run), samples)


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, Tensor) and value.numel() == 1:
            yield prefix + name, float(value.item())
        elif isinstance(value, numbers.Real):
            yield prefix + name, float(value)
        else:
            warnings.warn(
                f"log({prefix}{name}={value!r}): trackers take numbers, and this value is in metrics.jsonl alone; "
                "get_tracker(name, unwrap=True) is the package's own object",
                stacklevel=4,
            )


# -- event files of the engine's metrics: `MegatronLMPlugin(tensorboard_dir=...)` --------------------


class TrainingRecord:
    """The metrics of steps and evaluations, under Megatron's names. with_speed: times, throughput and memory, too."""

    def __init__(self, engine: Engine, *, with_speed: bool) -> None:
        self._engine, self._with_speed = engine, with_speed
        self._metrics = StepMetrics(engine)
        self._writer = _open(engine) if engine.ctx.is_writer else None

    def add_step(self, record: StepRecord, outcome: StepOutcome) -> None:
        """Collective over pipeline stages."""
        # On every rank: the metrics are collected from the pipeline stages, also where nothing is written.
        metrics = self._metrics.of_step(record, outcome, time.perf_counter())
        line = self._metrics.line_of_log(metrics)
        if self._writer is None or record.iteration % self._engine.config.logging.tensorboard_log_interval:
            return
        speed = log_values(line) if self._with_speed and line is not None else {}
        self._writer.write({**step_values(metrics), **speed}, record.iteration, record.consumed_samples)

    def add_evaluation(self, loss: float) -> None:
        state = self._engine.state
        if self._writer is not None:
            self._writer.write(
                evaluation_values({"valid_loss": loss}, in_nats_per_token=True), state.iteration, state.consumed_samples
            )

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close(finished=True)


def _open(engine: Engine) -> MetricWriter:
    tracker = engine.host[CALLBACKS].get("tensorboard", key="MegatronLMPlugin(tensorboard_dir)").build.load()
    run = TrackedRun(engine.config.to_dict(), None, engine.state.iteration, None)
    writer: MetricWriter = tracker(engine.config).open_writer(run)
    return writer
