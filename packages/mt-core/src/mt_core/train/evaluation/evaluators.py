"""Measurements of the model during training, beside the loss on validation sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost
from mt_core.train.callbacks import Run


class Evaluator(Protocol):
    def evaluate(self, run: Run) -> Mapping[str, float]:
        """Metrics by name, which go to callbacks with those of the validation sets. Collective over the world; those of
        rank 0 count."""
        ...


def configured_evaluators(config: Config, host: PluginHost) -> list[Evaluator]:
    """Those that the section [eval] turns on. Raises ConfigError for keys that no installed evaluator reads."""
    for key in ("perplexity", "without_neighbors"):
        if getattr(config.eval, key) and key not in host.evaluators.names():
            raise ConfigError(f"eval.{key} is set, and no plugin measures it; install mt-eval, or remove the key")
    built = [spec.build.load()(config) for spec in host.evaluators]
    # A plugin's build() returns None where the section does not turn it on.
    return [evaluator for evaluator in built if evaluator is not None]
