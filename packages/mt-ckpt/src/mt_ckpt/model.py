"""The model that a checkpoint's configuration describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config.loading import config_from_dict
from mt_core.config.schema import Config
from mt_core.errors import CheckpointError
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import ParameterLayout, parameter_layouts
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.specs import MODELS, SECTIONS
from mt_core.train.build import transform_model

BACKEND = "attention_backend"


def model_config(source: CheckpointReader, host: PluginHost) -> Config:
    """The configuration of the checkpoint's model, with the sections that other distributions bring (an adapter's); the
    others are at their defaults.

    Raises CheckpointError if the checkpoint has none, and ConfigError for an invalid one.
    """
    config = source.metadata.get("config")
    model = config.get("model") if isinstance(config, Mapping) else None
    if not isinstance(model, Mapping) or "family" not in model:
        raise CheckpointError("the checkpoint does not say what its model is: its metadata has no config.model.family")
    assert isinstance(config, Mapping)
    brought = {spec.name: config[spec.name] for spec in host[SECTIONS] if spec.name in config}
    return config_from_dict({"model": model, **brought}, host)


def build_model(config: Config, host: PluginHost, device: str = "cpu") -> nn.Module:
    """The whole model in fp32 with uninitialized weights and the eager attention backend."""
    # The eager backend takes every request, and exists on every machine.
    changes: dict[str, Any] = {BACKEND: "eager"} if BACKEND in type(config.model).model_fields else {}
    chosen = config.model_copy(update={"model": config.model.model_copy(update=changes)})
    ctx = ParallelContext(device=torch.device(device))
    spec = host[MODELS].get(chosen.model.family, key="model.family")
    context = ModelBuildContext(chosen, ctx, host)
    return transform_model(spec.build.load()(chosen.model, context), context)


def expected_parameters(config: Config, host: PluginHost) -> dict[str, ParameterLayout]:
    """Canonical name -> layout of every parameter of the configuration. Allocates no memory for values."""
    return parameter_layouts(build_model(config, host, "meta"))
