"""Parameter counts of presets, from models whose tensors hold no memory, and the command that trains one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from typing import Any

from mt_core.config.loading import config_from_dict, load_config_anywhere
from mt_core.config.schema import Config
from mt_core.config.sources import find_preset
from mt_core.errors import MtError
from mt_core.interfaces import Split
from mt_core.plugins import PluginHost


@dataclass(frozen=True)
class ModelSize:
    """Parameters of a model without padding, shared ones counted once."""

    total: int
    parts: Mapping[str, int]
    """Parameters by the part of the model that holds them, largest first."""
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
    from mt_core.data.building import build_tokenizer
    from mt_core.train.build import with_vocab_size

    if config.model.vocab_size is None:
        config = with_vocab_size(config, build_tokenizer(config, host))
    sizes = {name: prod(shape) for name, shape in canonical_shapes(config, host).items()}
    parts: Counter[str] = Counter()
    for name, size in sizes.items():
        parts[part_of(name)] += size
    return ModelSize(sum(sizes.values()), dict(parts.most_common()), config.model.vocab_size)


def canonical_shapes(config: Config, host: PluginHost) -> dict[str, tuple[int, ...]]:
    """Full shapes by global name: vocabularies without padding, shared tensors once. Raises MtError for a model that
    cannot be built."""
    import torch

    from mt_core.nn.layout import parameter_layouts
    from mt_core.parallel.context import ParallelContext
    from mt_core.train.build import build_model

    # The meta device has shapes and no memory, so a model of any size can be built here.
    model = build_model(config, ParallelContext(device=torch.device("meta")), host)
    return {name: tuple(layout.shape) for name, layout in parameter_layouts(model).items()}


def part_of(name: str) -> str:
    """ "decoder.layers.3.mlp.linear_fc1.weight" -> "decoder.layers.*.mlp": layers together, modules apart."""
    # Without the last part, "weight" or "bias".
    names = ["*" if part.isdigit() else part for part in name.split(".")[:-1]]
    depth = names.index("*") + 2 if "*" in names else 2
    return ".".join(names[:depth])


# -- training a preset: the command, and the keys that it lacks --------------------------------------

STEPS = "train.train_iters=1000"
CARRIED = ("builtin", "mock", "instructions")
"""Data sets that need no files."""


def training_command(name: str, host: PluginHost) -> tuple[str, list[str]]:
    """The command that trains preset `name`, and what else has to be set before it can, a sentence each."""
    command = f"mt train --preset {name}"
    try:
        config = load_config_anywhere(preset=name, host=host).config
    except MtError:
        # A configuration without a number of steps is refused; if one makes it legal, that is all that the preset
        # lacks.
        command = f"{command} --set {STEPS}"
        try:
            config = load_config_anywhere(preset=name, overrides=[STEPS], host=host).config
        except MtError as error:
            return command, str(error).splitlines()
    return command, _lacks(config, host)


def _lacks(config: Config, host: PluginHost) -> list[str]:
    """What the data would have to be."""
    problem = unsuitable_data_of(config, host)
    if problem is not None:
        return [f"{problem}: mt config keys data"]
    return [] if config.data.dataset_type in CARRIED else _missing_files(config, host)


def unsuitable_data_of(config: Config, host: PluginHost) -> str | None:
    """What the data do not give that the model takes, which torch builds without memory for it; None: nothing."""
    import torch

    from mt_core.data.building import build_tokenizer, unsuitable_data
    from mt_core.nn.model import required_inputs
    from mt_core.parallel.context import ParallelContext
    from mt_core.train.build import build_model, with_vocab_size

    config = with_vocab_size(config, build_tokenizer(config, host))
    model = build_model(config, ParallelContext(device=torch.device("meta")), host)
    return unsuitable_data(required_inputs(model), config, host)


def _missing_files(config: Config, host: PluginHost) -> list[str]:
    """What the data set says when it is built without its files."""
    problem = unusable_files_of(config, host, splits=("train",))
    return [] if problem is None else problem.splitlines()


def unusable_files_of(config: Config, host: PluginHost, splits: Sequence[Split] = ("train", "valid")) -> str | None:
    """What the data set says when it is built for training and validation; None: it can be."""
    from mt_core.data.building import build_datasets, build_tokenizer

    try:
        tokenizer = build_tokenizer(config, host)
        for split in splits:
            build_datasets(config, tokenizer, split, host)
    except MtError as error:
        return str(error)
    return None
