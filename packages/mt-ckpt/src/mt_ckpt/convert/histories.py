"""The amax histories of delayed FP8 scaling, which are stored among the parameters.

They determine a run's next scales. The model is the same without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from mt_core.specs import CheckpointReader

HISTORY = ".fp8.amax_history"
"""Suffix of the name of a linear layer's history."""
Value = TypeVar("Value")


def histories_of(reader: CheckpointReader) -> list[str]:
    return [name for name in reader.shapes() if name.endswith(HISTORY)]


def without_histories(reader: CheckpointReader) -> CheckpointReader:
    """The checkpoint without histories."""
    return _WithoutHistories(reader) if histories_of(reader) else reader


class _WithoutHistories:
    """A `mt_core.specs.CheckpointReader`."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._reader.metadata

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return _kept(self._reader.shapes())

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return _kept(self._reader.dtypes())

    def read(self, name: str) -> Tensor:
        return self._reader.read(name)

    def files(self) -> Mapping[str, bytes]:
        return self._reader.files()


def _kept(entries: Mapping[str, Value]) -> dict[str, Value]:
    return {name: value for name, value in entries.items() if not name.endswith(HISTORY)}
