"""Evaluation during training: the loss and metrics of named validation sets, and other measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mt_core.config.metrics import OVERALL, require_metrics, value_names, wanted_metrics
from mt_core.config.schema import Config
from mt_core.interfaces import Dataset
from mt_core.plugins import PluginHost
from mt_core.specs import EVALUATORS, Metric
from mt_core.train.callbacks import Run
from mt_core.train.engine import Engine
from mt_core.train.predictions import Predictions


def configured_metrics(config: Config, host: PluginHost) -> dict[str, Metric]:
    """The metrics of train.eval_metrics, or else of the data set, by name.

    Raises ConfigError for one that the loss does not have.
    """
    spec = require_metrics(config, host)
    return {name: spec.metrics[name].load() for name in wanted_metrics(config)}


def scores(predictions: Predictions, metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Mean loss and metrics over the samples that have a label."""
    outputs, losses, labels = predictions.labelled()
    count = max(len(losses), 1)
    # Metrics are functions of NumPy arrays, as those of scikit-learn.
    measured = {name: float(metric(outputs.numpy(), labels.numpy())) for name, metric in metrics.items()}
    return {"loss": float(losses.double().sum()) / count, **measured}


class Validation:
    """Values by name: `<set>_loss` and `<set>_<metric>` of each set, and `overall_<metric>` of several together."""

    def __init__(self, engine: Engine, sets: Mapping[str, Dataset]) -> None:
        self.engine, self.sets = engine, sets
        self.metrics = configured_metrics(engine.config, engine.host) if sets else {}
        if self.metrics:
            engine.require_predictions()

    def names(self) -> list[str]:
        return value_names(self.sets, self.metrics)

    def full_name(self, name: str) -> str:
        """A metric without a set is that of all sets together, or of the only one."""
        if name not in self.metrics:
            return name
        return f"{next(iter(self.sets)) if len(self.sets) == 1 else OVERALL}_{name}"

    def evaluate(self) -> dict[str, float]:
        """Collective."""
        if not self.metrics:
            return _prefixed({name: self._measure(dataset) for name, dataset in self.sets.items()})
        # One pass gives the loss and all metrics.
        predictions_of = {name: self.engine.predict(dataset) for name, dataset in self.sets.items()}
        values = _prefixed({name: scores(predictions, self.metrics) for name, predictions in predictions_of.items()})
        if len(predictions_of) > 1:
            # Over all samples and not the mean over sets, whose sizes differ.
            overall = scores(together(list(predictions_of.values())), self.metrics)
            values |= {f"{OVERALL}_{metric}": overall[metric] for metric in self.metrics}
        return values

    def _measure(self, dataset: Dataset) -> dict[str, float]:
        """The loss, and what it reports."""
        return {"loss": self.engine.evaluate(dataset), **self.engine.evaluation_metrics()}


def _prefixed(of_sets: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {f"{name}_{key}": value for name, values in of_sets.items() for key, value in values.items()}


def together(parts: Sequence[Predictions]) -> Predictions:
    """Those of several data sets, one after another."""

    def joined(tensors: list[Tensor]) -> Tensor:
        return torch.cat(tensors)

    common = set.intersection(*(set(part.fields) for part in parts))
    return Predictions(
        joined([part.outputs for part in parts]),
        joined([part.losses for part in parts]),
        {name: joined([part.fields[name] for part in parts]) for name in common},
    )


# -- evaluators: other measurements during training --------------------------------------------------


class Evaluator(Protocol):
    """Measures the model. An attribute `interval: int | None` may say the steps between measurements; else
    train.eval_interval does."""

    def evaluate(self, run: Run) -> Mapping[str, float]:
        """Metrics by name, which go to callbacks with those of the validation sets. Collective over the world; those of
        rank 0 count."""
        ...


def configured_evaluators(config: Config, host: PluginHost) -> list[Evaluator]:
    """Those that the configuration turns on."""
    built = [spec.build.load()(config) for spec in host[EVALUATORS].distinct()]
    # A plugin's build() returns None where the section does not turn it on.
    return [evaluator for evaluator in built if evaluator is not None]
