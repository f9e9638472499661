"""Models with Mamba-2 layers and their `transformers` references, with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from tests.models.decoder_reference import Pair, load
from torch import Tensor, nn

from mt_core.config.schema import Config
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import initialize
from mt_core.parallel.context import ParallelContext
from mt_core.specs import MODELS
from mt_models.hugging_face import load_reference


def make_pair(host, family: str, reference: nn.Module, randomize) -> Pair:
    """Randomize the reference, build ours from its configuration alone, and copy the weights through the name map."""
    reference = reference.float().eval()
    randomize(reference)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith("A_log"):  # rates and time steps of the size of trained ones
                parameter.uniform_(0.0, 1.5)
            elif name.endswith("dt_bias"):
                parameter.uniform_(-3.0, 0.5)
    maps = host[MODELS].get(family).name_maps["hf"].load()
    model = build(host, configure(host, **maps.read_config(reference.config.to_dict()))).eval()
    load_reference(model, reference.state_dict(), maps)
    return Pair(model, reference, maps)


def configure(host, *overrides: str, **keys: Any) -> Config:
    settings = [f"model.{key}={_toml(value)}" for key, value in keys.items()]
    return load(host, "data.seq_length=16", *settings, *overrides)


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def build(host, config: Config, ctx: ParallelContext | None = None) -> nn.Module:
    """With initial weights."""
    ctx = ctx or ParallelContext()
    model = host[MODELS].get(config.model.family).build.load()(config.model, ModelBuildContext(config, ctx, host))
    initialize(model, 1, ctx)
    return model


def segments_of(*lengths: int, batch: int = 2) -> Tensor:
    """Numbers of documents of these lengths, packed: [batch, sum of lengths]"""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).expand(batch, -1)
