"""From a checkpoint and calibration data to the smaller checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mt_ckpt.model import build_model, model_config
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.interfaces import Dataset
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.train.trained_model import load_model_weights
from mt_tune.pruning.checkpoint import PrunedCheckpoint
from mt_tune.pruning.selection import Kept, select
from mt_tune.pruning.sizes import Sizes, require_prunable
from mt_tune.pruning.statistics import Statistics, collect


@dataclass(frozen=True)
class Pruned:
    """positions: of the calibration data."""

    checkpoint: PrunedCheckpoint
    kept: Kept
    statistics: Statistics
    positions: int


def prune(
    source: CheckpointReader, batches: Iterable[Tensor], sizes: Sizes, host: PluginHost, device: str = "cpu"
) -> Pruned:
    """The model of a checkpoint with the parts that are most active on batches of token ids [B, S].

    The model is held once, in fp32, on one device. Raises ConfigError for a family or sizes that cannot be.
    """
    config = model_config(source, host)
    require_prunable(config.model, sizes)
    model = build_model(config, host, device)
    load_model_weights(model, source, ParallelContext(device=torch.device(device)))
    head_dim: int = config.model.head_dim  # type: ignore[attr-defined]
    statistics = collect(model, (tokens.to(device) for tokens in batches), head_dim)
    kept = select(statistics, sizes, config.model)
    return Pruned(PrunedCheckpoint(source, kept, sizes, host), kept, statistics, statistics.layers[0].positions)


def token_batches(dataset: Dataset, samples: int, batch: int = 4) -> Iterator[Tensor]:
    """Token ids [B, S] of the first samples of a data set."""
    count = min(samples, len(dataset))
    for first in range(0, count, batch):
        rows: list[Mapping[str, np.ndarray]] = [dataset[index] for index in range(first, min(first + batch, count))]
        yield torch.from_numpy(np.stack([row["tokens"] for row in rows]))
