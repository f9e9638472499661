"""Weights from the checkpoint of another model, as far as both have them (`checkpoint.load`).

A BERT becomes a classifier, a GPT a RETRO. What may differ is named in the configuration; any other difference, and a
name that fits nothing, is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, dtype

from mt_core.config.schema import CheckpointConfig
from mt_core.errors import CheckpointError, ConfigError
from mt_core.specs import CheckpointReader
from mt_core.train.checkpointing import MODEL, require_fit


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


def fresh_parameters(
    reader: CheckpointReader, shapes: Mapping[str, tuple[int, ...]], config: CheckpointConfig
) -> list[str]:
    """Parameters (of `shapes`, by name) that keep their initial values; the checkpoint has all the others.

    Raises ConfigError for a name in load_missing or load_ignored that fits nothing, CheckpointError for tensors that
    are missing, unexpected or misshapen without being named there.
    """
    stored = {name.removeprefix(MODEL) for name in reader.shapes() if name.startswith(MODEL)}
    ignored = _fitting(config.load_ignored, stored, "checkpoint.load_ignored", "tensor of the checkpoint")
    may_miss = _fitting(config.load_missing, shapes, "checkpoint.load_missing", "parameter of the model")
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
    return fresh


def _fitting(patterns: Iterable[str], names: Iterable[str], key: str, what: str) -> set[str]:
    """The names that fit one of the patterns. Raises ConfigError for a pattern that none fits."""
    names, found = list(names), set()
    for pattern in patterns:
        fitting = {name for name in names if fnmatchcase(name, pattern)}
        if not fitting:
            raise ConfigError(
                f'{key} has "{pattern}", which fits no {what}; their names begin with '
                f"{', '.join(sorted({name.partition('.')[0] for name in names}))}"
            )
        found |= fitting
    return found
