"""Partial loading: the weights that a model shares with the checkpoint of another model (`checkpoint.load`).

For example, a classifier is initialized from BERT, or RETRO from GPT. The configuration names the parameters that may
be missing or ignored. Any other difference, and a pattern that matches nothing, is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, dtype

from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config.schema import CheckpointConfig, Config
from mt_core.errors import CheckpointError, ConfigError
from mt_core.nn.build_context import active_transforms
from mt_core.nn.layout import ParameterLayout
from mt_core.plugins import PluginHost
from mt_core.specs import MODELS, StartsFrom
from mt_core.train.checkpoint.state import MODEL, RunState, merged_over_stages, require_fit, shapes_of_all_stages


@dataclass(frozen=True)
class SelectedTensors:
    """A checkpoint without some of its tensors."""

    reader: CheckpointReader
    left_out: frozenset[str]

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.reader.metadata

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: shape for name, shape in self.reader.shapes().items() if name not in self.left_out}

    def dtypes(self) -> Mapping[str, dtype]:
        return {name: kind for name, kind in self.reader.dtypes().items() if name not in self.left_out}

    def read(self, name: str) -> Tensor:
        return self.reader.read(name)

    def files(self) -> Mapping[str, bytes]:
        return self.reader.files()


@dataclass(frozen=True)
class PartialLoad:
    """initialized: parameters that keep their initial values. left_out: tensors of the checkpoint that are not read."""

    initialized: list[str]
    left_out: list[str]


def adapted(reader: CheckpointReader, config: Config, host: PluginHost) -> CheckpointReader:
    """The checkpoint under the names of the model that is trained, where it is of another family that this one starts
    from (`ModelSpec.adapt`) or a model transform changes what a model holds (`ModelTransformSpec.adapt`); else as it
    is."""
    adapt = host[MODELS].get(config.model.family, key="model.family").adapt
    reader = reader if adapt is None else adapt.load()(reader, config, host)
    for spec in active_transforms(config, host):
        if spec.adapt is not None:
            reader = spec.adapt.load()(reader, config, host)
    return reader


def load_weights(
    reader: CheckpointReader,
    run: RunState,
    layouts: Mapping[str, ParameterLayout],
    config: Config,
    host: PluginHost,
) -> PartialLoad:
    """Load the model's weights from another model's checkpoint. Collective. Raises as `partial_load` does."""
    reader = adapted(reader, config, host)
    starts_from = base_of(config.model.family, reader, host)
    added = merged_over_stages({name: True for name, layout in layouts.items() if layout.added}, run.ctx)
    shapes = shapes_of_all_stages(layouts, run.ctx)
    load = partial_load(reader, shapes, config.checkpoint, starts_from, frozenset(added))
    run.load_model(reader, {name: layout for name, layout in layouts.items() if name not in load.initialized})
    # The checkpoint of another model has no master weights of this one.
    run.copy_from_model()
    return load


def base_of(family: str, reader: CheckpointReader, host: PluginHost) -> StartsFrom | None:
    """How a model of `family` starts from a checkpoint of another family; None if nothing is declared."""
    stored = reader.metadata.get("config", {}).get("model", {}).get("family")
    declared = host[MODELS].get(family, key="model.family").starts_from
    return next((base for base in declared if base.family == stored), None)


def partial_load(
    reader: CheckpointReader,
    shapes: Mapping[str, tuple[int, ...]],
    config: CheckpointConfig,
    starts_from: StartsFrom | None = None,
    added: frozenset[str] = frozenset(),
) -> PartialLoad:
    """Which parameters (of `shapes`, by name) keep their initial values; the checkpoint has all the others.

    starts_from: what the family declares, whose patterns may match nothing. added: parameters of model transforms,
    which the checkpoint may lack.

    Raises ConfigError for a pattern in load_missing or load_ignored that matches nothing, CheckpointError for tensors
    that are missing, unexpected or of another shape without being named there.
    """
    stored = {name.removeprefix(MODEL) for name in reader.shapes() if name.startswith(MODEL)}
    # The user's patterns have to match something; those of the family may match nothing (see starts_from).
    ignored = _fitting(config.load_ignored, stored, "checkpoint.load_ignored", "tensor of the checkpoint")
    may_miss = _fitting(config.load_missing, shapes, "checkpoint.load_missing", "parameter of the model") | added
    if starts_from is not None:
        ignored |= {name for name in stored if _fits(name, starts_from.left_out)}
        may_miss |= {name for name in shapes if _fits(name, starts_from.initialized)}
    # A parameter that may be missing is loaded if the checkpoint has it.
    fresh = [name for name in shapes if name in may_miss and name not in stored - ignored]
    expected = {name: shape for name, shape in shapes.items() if name not in fresh}
    selected = SelectedTensors(reader, frozenset(MODEL + name for name in ignored))
    try:
        require_fit(selected, expected, MODEL)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. To start from another model, name what keeps its initial values in checkpoint.load_missing and "
            'what the checkpoint has too much in checkpoint.load_ignored, for instance ["lm_head.*"]'
        ) from error
    return PartialLoad(fresh, sorted(ignored))


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _fitting(patterns: Iterable[str], names: Iterable[str], key: str, what: str) -> set[str]:
    """The names that match one of the patterns. Raises ConfigError for a pattern that matches none."""
    names, matched = list(names), set()
    for pattern in patterns:
        fitting = {name for name in names if fnmatchcase(name, pattern)}
        if not fitting:
            raise ConfigError(
                f'{key} has "{pattern}", which fits no {what}; their names begin with '
                f"{', '.join(sorted({name.partition('.')[0] for name in names}))}"
            )
        matched |= fitting
    return matched
