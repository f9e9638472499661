"""Small models with adapters, and the folders of Hugging Face's and PEFT's formats that are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mt_ckpt.model import model_config
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.config.loading import config_from_dict
from mt_core.config.schema import Config
from mt_core.nn.layout import initialize, parameter_layouts
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.train.build import build_model
from mt_core.train.checkpoint.state import MODEL

LLAMA = {
    "family": "llama",
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "vocab_size": 101,
    "max_position_embeddings": 64,
}


class InMemory:
    """A `CheckpointReader` of canonical values."""

    def __init__(self, config: Mapping[str, Any], values: Mapping[str, Tensor]) -> None:
        self.metadata: Mapping[str, Any] = {"iteration": 0, "config": config}
        self.values = {MODEL + name: value for name, value in values.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self.values.items()}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: value.dtype for name, value in self.values.items()}

    def read(self, name: str) -> Tensor:
        return self.values[name].clone()

    def files(self) -> Mapping[str, bytes]:
        return {}


def adapted(host: PluginHost, base: Any, adapter: Mapping[str, Any], seed: int = 3) -> tuple[nn.Module, Config]:
    """A model on the weights of a checkpoint, with an adapter whose parameters all change what it computes."""
    config = model_config(InMemory({**base.metadata["config"], "adapter": adapter}, {}), host)
    ctx = ParallelContext()
    model = build_model(config, ctx, host)
    initialize(model, seed, ctx)
    layouts = parameter_layouts(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "adapter." not in name:
                parameter.copy_(layouts[name].to_local(base.read(MODEL + name), ctx))
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model, config


def loaded(host: PluginHost, reader: Any) -> nn.Module:
    """The model of a checkpoint."""
    ctx = ParallelContext()
    model = build_model(model_config(reader, host), ctx, host)
    layouts = parameter_layouts(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(layouts[name].to_local(reader.read(MODEL + name), ctx))
    return model


def reader_of(model: nn.Module, config: Config) -> InMemory:
    layouts = parameter_layouts(model)
    values = {name: layouts[name].to_canonical(p.detach()) for name, p in model.named_parameters()}
    return InMemory(config.to_dict(), values)


def base_of(host: PluginHost, model: Mapping[str, Any], seed: int = 1) -> InMemory:
    """Random weights, which a model of this section [model] has."""
    config = config_from_dict({"model": dict(model)}, host)
    ctx = ParallelContext()
    module = build_model(config, ctx, host)
    initialize(module, seed, ctx)
    return reader_of(module, config)


def write_peft(path: Path, model: nn.Module, config: Config, host: PluginHost) -> Path:
    from mt_tune.adapters.peft_folder import convert_checkpoint

    convert_checkpoint(path, reader_of(model, config), ConvertOptions(), host)
    return path
