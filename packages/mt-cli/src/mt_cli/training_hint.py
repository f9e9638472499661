"""How to train a preset: the command, and the keys that it lacks."""

from __future__ import annotations

from collections.abc import Sequence

from mt_core.config.loading import load_config_anywhere
from mt_core.config.schema import Config
from mt_core.errors import MtError
from mt_core.plugins import PluginHost

STEPS = "train.train_iters=1000"
CARRIED = ("builtin", "mock")
"""Data sets that need no files."""


def training_command(name: str, host: PluginHost) -> tuple[str, list[str]]:
    """The command that trains preset `name`, and what else has to be set before it can, a sentence each."""
    command = f"mt train --preset {name}"
    try:
        config = load_config_anywhere(preset=name, host=host).config
    except MtError:
        command = f"{command} --set {STEPS}"
        try:
            config = load_config_anywhere(preset=name, overrides=[STEPS], host=host).config
        except MtError as error:
            return command, str(error).splitlines()
    return command, lacks(config, host)


def lacks(config: Config, host: PluginHost) -> list[str]:
    """What the data would have to be."""
    missing = missing_inputs(config, host)
    if missing:
        given_by = sorted(spec.name for spec in host.datasets if set(missing) <= {entry.name for entry in spec.sample})
        others = f"; {', '.join(given_by)} do" if given_by else ""
        return [
            f"data.dataset_type={config.data.dataset_type} gives no {' and '.join(missing)}, which "
            f"model.family={config.model.family} takes{others}: mt config keys data"
        ]
    return [] if config.data.dataset_type in CARRIED else _missing_files(config, host)


def missing_inputs(config: Config, host: PluginHost) -> Sequence[str]:
    """Arrays that the model takes, that some data set gives, and the configured one does not."""
    import torch

    from mt_core.data.building import build_tokenizer
    from mt_core.parallel.context import ParallelContext
    from mt_core.train.build import build_model, with_vocab_size

    config = with_vocab_size(config, build_tokenizer(config, host))
    model = build_model(config, ParallelContext(device=torch.device("meta")), host)
    given = {entry.name for entry in host.datasets.get(config.data.dataset_type, key="data.dataset_type").sample}
    anywhere = {entry.name for spec in host.datasets for entry in spec.sample}
    return [name for name in getattr(model, "inputs", ()) if name not in given and name in anywhere]


def _missing_files(config: Config, host: PluginHost) -> list[str]:
    """What the data set says when it is built without its files."""
    from mt_core.data.building import build_datasets, build_tokenizer

    try:
        build_datasets(config, build_tokenizer(config, host), "train", host)
    except MtError as error:
        return str(error).splitlines()
    return []
