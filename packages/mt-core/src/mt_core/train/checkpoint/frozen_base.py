"""Checkpoints without the parameters that are not trained (`checkpoint.save_frozen`): see mt_core.checkpoint_base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from mt_core.checkpoint_base import BASE, OverBase, base_entry, described
from mt_core.checkpoint_lookup import find_checkpoint, open_checkpoint
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config.schema import CheckpointConfig, Config
from mt_core.errors import ConfigError
from mt_core.nn.layout import ParameterLayout
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.first_rank import on_first_rank
from mt_core.paths import absolute
from mt_core.plugins import PluginHost
from mt_core.train.checkpoint.partial_load import adapted
from mt_core.train.checkpoint.saving import CheckpointContents
from mt_core.train.checkpoint.state import MODEL, shapes_of_all_stages, untrained_of_all_stages


@dataclass(frozen=True)
class FrozenBase:
    """What checkpoints of a run leave out, and where it is: the entry of their metadata."""

    entry: Mapping[str, Any]

    def leave_out(self, contents: CheckpointContents) -> CheckpointContents:
        """The contents without what the base has."""
        left_out = self.entry["tensors"]
        kept = [fragment for fragment in contents.fragments if fragment.name not in left_out]
        return replace(contents, fragments=kept, metadata={**contents.metadata, BASE: dict(self.entry)})


def frozen_base(
    config: Config,
    layouts: Mapping[str, ParameterLayout],
    ctx: ParallelContext,
    host: PluginHost,
    resumed: CheckpointReader | None,
) -> FrozenBase | None:
    """What the checkpoints of this run leave out; None with checkpoint.save_frozen. Collective over the world.

    resumed: the checkpoint that the run goes on from, None for a new run. The first rank reads the frozen tensors of
    checkpoint.load once more, one at a time, for their hashes. Raises ConfigError for a run that has no base, and where
    nothing of it is frozen.
    """
    if config.checkpoint.save_frozen:
        return None
    _require_supported(config.checkpoint)
    entry = resumed.entry if isinstance(resumed, OverBase) else _new_entry(config, layouts, ctx, host)
    if not entry["tensors"]:
        raise ConfigError(
            "checkpoint.save_frozen=false, and no parameter of checkpoint.load is frozen; name some in "
            "train.frozen_parameters, or set it to true"
        )
    return FrozenBase(entry)


def _require_supported(keys: CheckpointConfig) -> None:
    if keys.ckpt_format != "mt":
        raise ConfigError(
            f"checkpoint.save_frozen=false with checkpoint.ckpt_format={keys.ckpt_format}: only checkpoints of the "
            "format mt can name a base; set save_frozen to true"
        )
    if keys.load is None:
        raise ConfigError(
            "checkpoint.save_frozen=false leaves out what checkpoint.load has, which is not set; set it, or "
            "save_frozen to true"
        )


def _new_entry(
    config: Config, layouts: Mapping[str, ParameterLayout], ctx: ParallelContext, host: PluginHost
) -> Mapping[str, Any]:
    assert config.checkpoint.load is not None  # by _require_supported
    path = find_checkpoint(config.checkpoint.load)
    reader = open_checkpoint(path, host)
    if adapted(reader, config, host) is not reader:
        raise ConfigError(
            f"checkpoint.save_frozen=false: the run takes the weights of {path} under other names or in another form "
            "(another family, or adapter.base); set save_frozen to true"
        )
    names = _frozen_names(layouts, ctx, reader, config.checkpoint)
    if isinstance(reader, OverBase):
        # A chain is never longer than one: what the other difference held is written again.
        stored = reader.entry["tensors"]
        kept = {name: stored[name] for name in names if name in stored}
        return base_entry(str(reader.base_path), kept)
    return base_entry(str(absolute(path)), on_first_rank(partial(described, reader, names), ctx.world))


def _frozen_names(
    layouts: Mapping[str, ParameterLayout], ctx: ParallelContext, reader: CheckpointReader, keys: CheckpointConfig
) -> list[str]:
    """Tensors of the checkpoint that the run holds as they are there, and does not train."""
    frozen, shapes, stored = untrained_of_all_stages(layouts, ctx), shapes_of_all_stages(layouts, ctx), reader.shapes()
    read = [name for name in frozen if not any(fnmatchcase(name, pattern) for pattern in keys.load_ignored)]
    return [MODEL + name for name in read if stored.get(MODEL + name) == shapes[name]]
