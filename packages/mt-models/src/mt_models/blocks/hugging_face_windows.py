"""`layer_types` of Hugging Face's classes as `window_attn_skip_freq`: which layers have a sliding window."""

from __future__ import annotations

from collections.abc import Sequence

from mt_core.config.layer_pattern import pattern_of
from mt_core.errors import ConfigError
from mt_models.blocks.hugging_face_decoder import FULL, SLIDING


def import_windows(kinds: Sequence[str] | None, layers: int, default: int | str) -> int | str:
    """A number where one says it, else a pattern. default: without `layer_types`. Raises ConfigError for another kind
    of layer, or another number of them."""
    if kinds is None:
        return default
    if len(kinds) != layers or set(kinds) - {FULL, SLIDING}:
        raise ConfigError(
            f"layer_types={list(kinds)} is not supported; it can be {FULL} or {SLIDING} for each of {layers} layers"
        )
    windows = [kind == SLIDING for kind in kinds]
    # 1: no layer has a window; layers + 1: all of them have. Otherwise a period, where one fits.
    for every in range(1, layers + 2):
        if windows == [(layer + 1) % every != 0 for layer in range(layers)]:
            return every
    return pattern_of(windows)
