"""From a checkpoint and calibration data to the smaller checkpoint, which every saver can write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mt_ckpt.model import build_model, expected_parameters, model_config
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.interfaces import Dataset
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.train.trained_model import load_model_weights
from mt_tune.pruning.dimensions import PrunedTensors
from mt_tune.pruning.selection import Kept, select
from mt_tune.pruning.sizes import Sizes, pruned_section, require_prunable
from mt_tune.pruning.statistics import Statistics, collect

TRAINING = ("data", "train", "optimizer", "lr_schedule", "checkpoint", "parallel", "distillation")
"""Sections of the run that made the larger model, which say nothing of the smaller one."""


class PrunedCheckpoint:
    """A `CheckpointReader` of the kept parts of a checkpoint's model, without optimizer state."""

    def __init__(self, source: CheckpointReader, kept: Kept, sizes: Sizes, host: PluginHost) -> None:
        """Raises ConfigError for a model with parameters of unknown dimensions."""
        config = model_config(source, host)
        stored = source.metadata["config"]
        model = pruned_section(config.model, dict(stored["model"]), sizes, kept.layers)
        sections = {name: section for name, section in stored.items() if name not in TRAINING}
        self.metadata: Mapping[str, Any] = {**source.metadata, "config": {**sections, "model": model}}
        self._source = source
        self._tensors = PrunedTensors(kept, config.model)
        layouts = expected_parameters(model_config(self, host), host)
        self._shapes = {MODEL + name: layout.shape for name, layout in layouts.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def dtypes(self) -> Mapping[str, torch.dtype]:
        dtypes = self._source.dtypes()
        return {name: dtypes[self._source_name(name)] for name in self._shapes}

    def read(self, name: str) -> Tensor:
        source = self._source_name(name)
        pruned = self._tensors.prune(source.removeprefix(MODEL), self._source.read(source)).contiguous()
        assert tuple(pruned.shape) == self._shapes[name], (name, tuple(pruned.shape), self._shapes[name])
        return pruned

    def files(self) -> Mapping[str, bytes]:
        return self._source.files()

    def _source_name(self, name: str) -> str:
        return MODEL + self._tensors.source_of(name.removeprefix(MODEL))


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
