"""The smaller model as a checkpoint that every saver can write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.model import expected_parameters, model_config
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.plugins import PluginHost
from mt_tune.pruning.dimensions import PrunedTensors
from mt_tune.pruning.selection import Kept
from mt_tune.pruning.sizes import Sizes, pruned_section

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
