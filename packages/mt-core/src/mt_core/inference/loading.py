"""A model and its tokenizer from a run directory or a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from mt_core.checkpoint_lookup import find_checkpoint, open_checkpoint
from mt_core.config.loading import config_from_dict
from mt_core.config.schema import Config
from mt_core.nn.layout import parameter_layouts
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.specs import Tokenizer
from mt_core.train import build
from mt_core.train.checkpoint.state import MODEL, load_parameters, require_fit


@dataclass(frozen=True)
class TrainedModel:
    """Ready to use: in evaluation mode, on the wanted device."""

    model: nn.Module
    tokenizer: Tokenizer
    config: Config
    checkpoint: Path
    iteration: int


def load_trained_model(path: str | Path, host: PluginHost, *, device: str = "auto") -> TrainedModel:
    """Raises CheckpointError when there is no checkpoint at `path`, or it is damaged."""
    checkpoint = find_checkpoint(path)
    reader = open_checkpoint(checkpoint, host)
    # Whatever layout trained it: here it is whole.
    config = config_from_dict({**reader.metadata["config"], "parallel": {}}, host)
    tokenizer = build.restore_tokenizer(config, reader.files(), host)
    # Not the job's context, which all of its processes would have to make together.
    ctx = ParallelContext(device=build.resolve_device(device), params_dtype=build.DTYPES[config.precision.dtype])
    model = build.build_model(config, ctx, host)
    layouts = parameter_layouts(model)
    require_fit(reader, {name: layout.shape for name, layout in layouts.items()}, MODEL)
    load_parameters(model.named_parameters(), reader, layouts, MODEL, ctx)
    model.eval()
    return TrainedModel(model, tokenizer, config, checkpoint, int(reader.metadata["iteration"]))
