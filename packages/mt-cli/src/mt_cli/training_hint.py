"""How to train a preset: the command, and the keys that it lacks."""

from __future__ import annotations

from collections.abc import Sequence

from mt_core.config.loading import load_config_anywhere
from mt_core.config.schema import Config
from mt_core.errors import MtError
from mt_core.plugins import PluginHost
from mt_core.specs import Split

STEPS = "train.train_iters=1000"
CARRIED = ("builtin", "mock")
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
