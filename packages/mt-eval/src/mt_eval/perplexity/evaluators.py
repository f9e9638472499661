"""Evaluators that the plugin registers: perplexity of texts, and the loss of RETRO without neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.interfaces import Dataset
from mt_core.train.trainer import Trainer
from mt_eval.config import EvalConfig

if TYPE_CHECKING:
    from mt_eval.perplexity.during_training import PerplexityEvaluator


def build_evaluator(config: Config) -> PerplexityEvaluator | None:
    if not config.section(EvalConfig).perplexity:
        return None
    # Imports the inference engine, which a run without such texts starts 0.2 s sooner without.
    from mt_eval.perplexity.during_training import PerplexityEvaluator

    return PerplexityEvaluator(config)


# -- RETRO without neighbours, beside the validation loss with them ----------------------------------

MASK = "neighbor_mask"


@dataclass(frozen=True)
class WithoutNeighbors:
    """A data set whose chunks have no neighbours."""

    dataset: Dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        sample = self.dataset[index]
        # The mask alone is cleared: shapes stay those of training.
        return {**sample, MASK: np.zeros_like(sample[MASK])}

    def describe(self, index: int) -> str:
        return self.dataset.describe(index)


class LossWithoutNeighbors:
    """Implements mt_core.train.validation.Evaluator."""

    def __init__(self, interval: int | None) -> None:
        self.interval = interval

    def evaluate(self, run: Trainer) -> Mapping[str, float]:
        """`<set>_loss_without_neighbors` of each validation set, over the samples of its loss."""
        return {
            # engine.evaluate is collective; all ranks have the same sets.
            f"{name}_loss_without_neighbors": run.engine.evaluate(WithoutNeighbors(dataset))
            for name, dataset in run.valid_data.items()
        }


def build_without_neighbors(config: Config) -> LossWithoutNeighbors | None:
    """Raises ConfigError for data without neighbours."""
    if not config.section(EvalConfig).without_neighbors:
        return None
    if not hasattr(config.data, "retro_num_neighbors"):
        raise ConfigError(
            f"eval.without_neighbors=true: samples of data.dataset_type={config.data.dataset_type} have no neighbours; "
            "remove the key"
        )
    return LossWithoutNeighbors(config.section(EvalConfig).interval)
