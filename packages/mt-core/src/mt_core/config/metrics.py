"""Which values evaluations have: what train.eval_metrics and checkpoint.best_metric can name."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mt_core.config.schema import AUTO_LOSS, Config
from mt_core.errors import ConfigError, did_you_mean
from mt_core.plugins import PluginHost
from mt_core.specs import LOSSES, MODELS, LossSpec

# -- the registered loss that `train.loss` names -----------------------------------------------------


def configured_loss(config: Config, host: PluginHost) -> LossSpec:
    """The loss that `train.loss` names; for `auto` the default of the model family."""
    name = config.train.loss
    if name == AUTO_LOSS:
        name = host[MODELS].get(config.model.family, key="model.family").default_loss
    return host[LOSSES].get(name, key="train.loss")


OVERALL = "overall"
"""Stands for all validation sets together, where there are several."""


def check_metrics(config: Config, host: PluginHost) -> None:
    """Raise ConfigError for a metric that the loss does not have, and for a value that no evaluation has."""
    if config.train.eval_metrics is not None:
        require_metrics(config, host)
    best = config.checkpoint.best_metric
    if best is None:
        return
    metrics = wanted_metrics(config)
    sets = getattr(config.data, "valid_data_paths", None)
    names = value_names(sets or ("valid",), metrics)
    # Without names in the configuration, sets are those that the data set or the program has.
    fits = best in names if sets else any(best.endswith(f"_{value}") for value in ("loss", *metrics))
    if best not in metrics and not fits:
        require_known_metric(best, names)


def wanted_metrics(config: Config) -> Sequence[str]:
    """The metrics of train.eval_metrics, or else of the data set."""
    return config.data.metrics if config.train.eval_metrics is None else config.train.eval_metrics


def require_metrics(config: Config, host: PluginHost) -> LossSpec:
    """The configured loss. Raises ConfigError for a wanted metric that it does not have."""
    spec = configured_loss(config, host)
    for name in wanted_metrics(config):
        if name not in spec.metrics:
            raise ConfigError(_unknown_metric(name, config, spec))
    return spec


def _unknown_metric(name: str, config: Config, loss: LossSpec) -> str:
    if config.train.eval_metrics is None:
        return (
            f"data.dataset_type={config.data.dataset_type} is evaluated by {name}, which train.loss={loss.name} does "
            "not have; set train.eval_metrics (to [] for the loss alone)"
        )
    known = ", ".join(loss.metrics) or "no metrics"
    return f'train.eval_metrics has "{name}", and train.loss={loss.name} has {known}{did_you_mean(name, loss.metrics)}'


def value_names(sets: Collection[str], metrics: Collection[str]) -> list[str]:
    """`<set>_loss` and `<set>_<metric>` of each set, and `overall_<metric>` of several together."""
    several = [OVERALL] if len(sets) > 1 else []
    return [f"{name}_loss" for name in sets] + [f"{part}_{metric}" for part in (*sets, *several) for metric in metrics]


def require_known_metric(metric: str, names: Collection[str], key: str = "checkpoint.best_metric") -> None:
    """Raise ConfigError for a metric of `key` that evaluations of validation sets do not have."""
    if metric not in names:
        known = (
            f"evaluations have {', '.join(names)}"
            if names
            else "there is no validation set; name one, or set it to null"
        )
        raise ConfigError(f'{key}="{metric}": {known}{did_you_mean(metric, names)}')
