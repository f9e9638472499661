"""Which layers have a sliding window: a number, or a pattern with an entry for each layer."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from mt_core.config.fields import PositiveInt
from mt_core.config.layer_pattern import parse_pattern, read_pattern

KEY = "model.sliding_window_pattern"


def _known(pattern: int | str) -> int | str:
    if isinstance(pattern, str):
        parse_pattern(pattern, KEY)
    return pattern


WindowPattern = Annotated[PositiveInt | str, AfterValidator(_known)]
"""Type of a key: every so many layers one has no window; or a pattern such as "([1]*3+[0]*2+[1]*1)" with a 1 for each
layer that has one."""


def has_window(pattern: int | str, layer: int, num_layers: int) -> bool:
    """False for a layer behind the last of a pattern. Raises ConfigError for one of another length than num_layers."""
    if isinstance(pattern, int):
        return (layer + 1) % pattern != 0
    return layer < num_layers and read_pattern(pattern, num_layers, KEY)[layer]


def first_without_window(pattern: int | str, num_layers: int) -> int:
    """The number of the first layer without a window, which may be behind the last one."""
    if isinstance(pattern, int):
        return pattern - 1
    return next(layer for layer in range(num_layers + 1) if not has_window(pattern, layer, num_layers))
