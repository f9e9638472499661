"""Exact parameter counts of presets, from models whose tensors hold no memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from typing import Any

from mt_core.config.loading import config_from_dict
from mt_core.config.schema import Config
from mt_core.config.sources import find_preset
from mt_core.errors import MtError
from mt_core.plugins import PluginHost


@dataclass(frozen=True)
class ModelSize:
    """Parameters of a model without padding, shared ones counted once."""

    total: int
    parts: Mapping[str, int]
    """By the part of the model that holds them, largest first."""
    vocab_size: int | None


@dataclass(frozen=True)
class Preset:
    """A preset with its size, or why the size is not known."""

    name: str
    family: str
    values: Mapping[str, Mapping[str, Any]]
    size: ModelSize | None
    problem: str | None = None


def can_count() -> bool:
    """Counting builds the models, which takes torch."""
    return find_spec("torch") is not None


def measured_preset(name: str, host: PluginHost) -> Preset:
    """Raises ConfigError for a name that is no preset, or that of two."""
    values = find_preset(name, host)
    family = values["model"]["family"]
    if not can_count():
        return Preset(name, family, values, None, 'torch is missing (pip install "mt-core[train]")')
    try:
        return Preset(name, family, values, count_parameters(config_from_dict(values, host), host))
    except MtError as error:
        return Preset(name, family, values, None, f"{name}: {error}")
    except Exception as error:  # one plugin's defect must not hide the other models
        return Preset(name, family, values, None, f"{name}: {type(error).__name__}: {error}")


def count_parameters(config: Config, host: PluginHost) -> ModelSize:
    """Build the model on the meta device and add up its canonical shapes."""
    import torch

    from mt_core.data.building import build_tokenizer
    from mt_core.nn.layout import parameter_layouts
    from mt_core.parallel.context import ParallelContext
    from mt_core.train.build import build_model, with_vocab_size

    if config.model.vocab_size is None:
        config = with_vocab_size(config, build_tokenizer(config, host))
    # The meta device has shapes and no memory, so a model of any size can be built here.
    model = build_model(config, ParallelContext(device=torch.device("meta")), host)
    # Full shapes by global name: vocabularies without padding, shared tensors once.
    sizes = {name: prod(layout.shape) for name, layout in parameter_layouts(model).items()}
    parts: Counter[str] = Counter()
    for name, size in sizes.items():
        parts[part_of(name)] += size
    return ModelSize(sum(sizes.values()), dict(parts.most_common()), config.model.vocab_size)


def part_of(name: str) -> str:
    """ "decoder.layers.3.mlp.linear_fc1.weight" -> "decoder.layers.*.mlp": layers together, modules apart."""
    # Without the last part, "weight" or "bias".
    names = ["*" if part.isdigit() else part for part in name.split(".")[:-1]]
    depth = names.index("*") + 2 if "*" in names else 2
    return ".".join(names[:depth])
