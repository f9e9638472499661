"""A model and its tokenizer from a run directory or a checkpoint of any format, in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mt_core.checkpoint_lookup import find_checkpoint, open_checkpoint
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config.loading import config_from_dict
from mt_core.config.schema import Config
from mt_core.interfaces import Tokenizer
from mt_core.nn.layout import ParameterLayout, parameter_layouts
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.tensor_slice import TensorSlice
from mt_core.train import build
from mt_core.train.checkpoint.local_shards import LocalShard, fill, identity
from mt_core.train.checkpoint.state import MODEL, require_fit, shapes_of_all_stages
from mt_core.train.pipelining import Stages, build_stages
from mt_core.train.same_start import require_same_checkpoint, require_same_program


@dataclass(frozen=True)
class TrainedModel:
    """Ready to use: in evaluation mode, on the requested device. stages: None without pipeline parallelism."""

    model: nn.Module
    tokenizer: Tokenizer
    config: Config
    checkpoint: Path
    iteration: int
    ctx: ParallelContext
    stages: Stages | None = None


def load_trained_model(
    path: str | Path,
    host: PluginHost,
    *,
    device: str = "auto",
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> TrainedModel:
    """The model on this process alone, whatever layout trained it; or in the layout of settings["parallel"], this
    rank's part of it (then collective over the world).

    settings: section -> values in place of the checkpoint's. Raises CheckpointError when there is no checkpoint at
    `path`, or it is damaged.
    """
    checkpoint = find_checkpoint(path)
    reader = open_checkpoint(checkpoint, host)
    config = _config(reader, settings or {}, host)
    tokenizer = build.restore_tokenizer(config, reader.files(), host)
    alone = "parallel" not in (settings or {})
    if not alone:
        require_same_program(config, tokenizer, host)
        require_same_checkpoint(checkpoint, reader, config)
    ctx = _context(config, build.resolve_device(device), alone=alone)
    stages = build_stages(config, ctx, host)
    model = build.build_model(config, ctx, host, None if stages is None else stages.own)
    load_model_weights(model, reader, ctx)
    model.eval()
    return TrainedModel(model, tokenizer, config, checkpoint, int(reader.metadata["iteration"]), ctx, stages)


def load_model_weights(model: nn.Module, reader: CheckpointReader, ctx: ParallelContext) -> None:
    """This rank's shards of the weights. Raises CheckpointError unless the checkpoint has exactly the model's."""
    layouts = parameter_layouts(model)
    require_fit(reader, shapes_of_all_stages(layouts, ctx), MODEL)
    for name, parameter in model.named_parameters():
        fill(_shard(name, layouts[name], parameter.detach()), reader, ctx)


def _shard(name: str, layout: ParameterLayout, weight: torch.Tensor) -> LocalShard:
    if layout.padded:
        weight.zero_()
    return LocalShard(
        MODEL + name, layout, weight.dtype, [TensorSlice.whole(tuple(weight.shape))], partial(identity, weight)
    )


def _config(reader: CheckpointReader, settings: Mapping[str, Mapping[str, Any]], host: PluginHost) -> Config:
    # The layout of training is not that of use: default sizes, unless settings give others.
    stored = {**reader.metadata["config"], "parallel": {}}
    for section, values in settings.items():
        stored[section] = {**stored.get(section, {}), **values}
    return config_from_dict(stored, host)


def _context(config: Config, device: torch.device, *, alone: bool) -> ParallelContext:
    if not alone:
        return build.build_context(config, device)
    # Not the job's context, which all of its processes would have to make together.
    return ParallelContext(device=device, params_dtype=build.DTYPES[config.precision.dtype])
