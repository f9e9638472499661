"""A base and a PEFT folder as one checkpoint of the adapted model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.megatron_dist.bridge_adapter import detect as detect_bridge
from mt_ckpt.megatron_dist.index import RUN_CONFIG
from mt_ckpt.model import build_model, model_config
from mt_core.checkpoint_lookup import MODEL, find_checkpoint, open_checkpoint
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.errors import ConfigError
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_tune.adapters.peft_config import CONFIG
from mt_tune.adapters.peft_folder import read_values
from mt_tune.adapters.peft_reading import base_of, described_section

SECTION = "adapter"
NAMES_BASE = f"base_model_name_or_path in {CONFIG}"


class AdaptedCheckpoint:
    """The tensors of a base and those of an adapter (a `CheckpointReader`)."""

    def __init__(self, base: CheckpointReader, folder: Path, host: PluginHost) -> None:
        """Raises ConfigError and CheckpointError for an adapter that is not one of this base."""
        stored = base.metadata["config"]
        if stored.get(SECTION, {}).get("type", "none") != "none":
            raise ConfigError(f"{folder}: the base has an adapter itself; merge that first (mt ckpt merge-adapter)")
        self._base = base
        self.metadata: Mapping[str, Any] = {
            **base.metadata,
            "config": {**stored, SECTION: described_section(folder)},
        }
        config = model_config(self, host)
        model = build_model(config, host, "meta")
        values = read_values(folder, model, config, host, ParallelContext(), lambda name: base.read(MODEL + name))
        self._values = {MODEL + name: value for name, value in values}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {**self._base.shapes(), **{name: tuple(value.shape) for name, value in self._values.items()}}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {**self._base.dtypes(), **{name: value.dtype for name, value in self._values.items()}}

    def read(self, name: str) -> Tensor:
        # What modules_to_save hold stands in place of the base's.
        return self._values[name] if name in self._values else self._base.read(name)

    def files(self) -> Mapping[str, bytes]:
        return self._base.files()


def detect(path: Path) -> bool:
    """Whether `path` is a PEFT folder, or an adapter of Megatron-Bridge."""
    return (path / CONFIG).is_file() or detect_bridge(path)


def open_checkpoint_on_base(path: Path, host: PluginHost) -> AdaptedCheckpoint:
    """An adapter on the base that its folder names. Raises ConfigError where that is no folder."""
    base = base_of(path)
    if not base or not Path(base).is_dir():
        where = f"checkpoint.pretrained_checkpoint in {RUN_CONFIG}" if detect_bridge(path) else NAMES_BASE
        raise ConfigError(
            f"{path} is an adapter of {base!r}, which is no folder on this machine: write the path of the base to "
            f"{where}, or name both (mt serve BASE --adapter NAME={path})"
        )
    return AdaptedCheckpoint(open_checkpoint(find_checkpoint(base), host), path, host)
