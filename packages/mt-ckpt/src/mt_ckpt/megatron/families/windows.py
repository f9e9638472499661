"""Sliding windows: Megatron's window_size and window_attn_skip_freq, and the window of each of our layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mt_ckpt.megatron.arguments import Arguments
from mt_core.config.layer_pattern import read_pattern
from mt_core.errors import ConfigError

SKIPPED = "window_attn_skip_freq"


def windows_of(args: Arguments, num_layers: int) -> list[int | None]:
    """Of each layer the positions that a query sees, itself included; None: everything before it.

    Megatron's window_size counts those before the query and those after it, -1 for all; window_attn_skip_freq is None
    (all layers have the window), n (every n-th has none), or a 1 for each layer that has it. Raises ConfigError.
    """
    window = args.values.get("window_size")
    if window is None:
        return [None] * num_layers
    if len(window) != 2 or window[1] not in (0, -1):
        raise ConfigError(f"{args.origin}: window_size={window!r} is not read; it can be (left, 0)")
    # Megatron's left counts positions before the query: left 127 is a window of 128 with the query.
    size = int(window[0]) + 1 if window[0] >= 0 else None
    return [size if has_it else None for has_it in _layers_with_window(args, num_layers)]


def _layers_with_window(args: Arguments, num_layers: int) -> list[bool]:
    given = args.values.get(SKIPPED)
    if given is None:
        return [True] * num_layers
    if isinstance(given, str):
        return read_pattern(given, num_layers, SKIPPED)
    if isinstance(given, list | tuple) and len(given) == num_layers:
        return [bool(entry) for entry in given]
    if isinstance(given, int) and given > 0:
        # Megatron numbers layers from 1 here: with n = 4 the layers 4, 8, ... (3, 7, ... from 0) have no window.
        return [(layer + 1) % given != 0 for layer in range(num_layers)]
    raise ConfigError(
        f"{args.origin}: {SKIPPED}={given!r} is not read; it can be None, a number above 0, or a list with an entry "
        f"for each of the {num_layers} layers"
    )


def window_arguments(model: Any) -> dict[str, Any]:
    """The same of our model. Raises ConfigError for windows of several sizes, which no argument says."""
    windows = [model.window_of(layer) for layer in range(model.num_layers)]
    sizes = {window for window in windows if window is not None}
    if len(sizes) > 1:
        raise ConfigError(
            f"model.family={model.family} with windows of {' and '.join(map(str, sorted(sizes)))} positions cannot be "
            "written as Megatron's arguments, which have one size"
        )
    if not sizes:
        return {"window_size": None, SKIPPED: None}
    return {"window_size": (sizes.pop() - 1, 0), SKIPPED: _skipped([window is not None for window in windows])}


def _skipped(layers: Sequence[bool]) -> int | list[int] | None:
    """A number where one says it, else a list."""
    if all(layers):
        return None
    # n = len(layers): only the last layer has none.
    for every in range(2, len(layers) + 1):
        if list(layers) == [(layer + 1) % every != 0 for layer in range(len(layers))]:
            return every
    return [int(has_it) for has_it in layers]
