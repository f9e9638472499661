"""The sections [tensorboard], [wandb], [mlflow], [trackio] and [comet]: options of the trackers of these names."""

from __future__ import annotations

from typing import Any, ClassVar

from mt_core.config.fields import PositiveInt, Section, used_when


def _option(tracker: str, default: Any = None) -> Any:
    return used_when(default, **{"logging.trackers": tracker})


class TensorBoardConfig(Section):
    """Event files of TensorBoard."""

    keys_of_node: ClassVar[frozenset[str]] = frozenset({"dir"})

    dir: str | None = _option("tensorboard")
    """Folder of event files. Default: `tensorboard` in the run directory."""
    queue_size: PositiveInt = _option("tensorboard", 1000)
    """Points that wait in memory to be written."""


class WandbConfig(Section):
    """A run of Weights & Biases."""

    keys_of_node: ClassVar[frozenset[str]] = frozenset({"save_dir"})

    project: str | None = _option("wandb")
    """Project. Default: WANDB_PROJECT, else that of Weights & Biases."""
    entity: str | None = _option("wandb")
    """User or team. Default: WANDB_ENTITY, else that of the login."""
    exp_name: str | None = _option("wandb")
    """Name of the run. Default: that of the run directory."""
    save_dir: str | None = _option("wandb")
    """Local folder of its files. Default: the run directory."""


class MlflowConfig(Section):
    """A run of MLflow."""

    tracking_uri: str | None = _option("mlflow")
    """Address of the server, or sqlite:///FILE. Default: MLFLOW_TRACKING_URI, else MLflow's own."""
    experiment: str | None = _option("mlflow")
    """Name of the experiment, made if missing. Default: MLFLOW_EXPERIMENT_NAME, else MLflow's own."""
    run_name: str | None = _option("mlflow")
    """Name of the run. Default: that of the run directory."""


class TrackioConfig(Section):
    """A run of trackio."""

    project: str = _option("trackio", "mt")
    """Project."""
    name: str | None = _option("trackio")
    """Name of the run. Default: that of the run directory."""


class CometConfig(Section):
    """An experiment of Comet."""

    workspace: str | None = _option("comet")
    """Workspace. Default: COMET_WORKSPACE, else that of the login."""
    project: str | None = _option("comet")
    """Project. Default: COMET_PROJECT_NAME, else Comet's own."""
    experiment_name: str | None = _option("comet")
    """Name of the experiment. Default: that of the run directory."""
