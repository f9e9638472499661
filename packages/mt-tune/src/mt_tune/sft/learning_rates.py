"""Factors of the learning rate by parameter: the model transform of `tune.lr_multipliers` and `tune.layer_lr_decay`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import LayoutModule
from mt_tune.sft.config import TuneConfig

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EMBEDDING = re.compile(r"(?:^|\.)embedding\.")


def set_rates(model: nn.Module, config: Config, context: ModelBuildContext) -> nn.Module:
    """The model with factors of the learning rate in the layouts of its parameters, times those that are there.

    Raises ConfigError where this process has the whole model and a pattern names no parameter.
    """
    tune = config.section(TuneConfig)
    decayed = _layer_factors(tune.layer_lr_decay, config.model.stacked_layers)
    used: set[str] = set()
    for path, module in model.named_modules():
        for name, layout in dict(module.layouts).items() if isinstance(module, LayoutModule) else ():
            full = f"{path}.{name}" if path else name
            pattern = first_match(full, tune.lr_multipliers)
            used |= {pattern} if pattern is not None else set()
            factor = (1.0 if pattern is None else tune.lr_multipliers[pattern]) * decayed(full)
            module.layouts[name] = replace(layout, lr_mult=layout.lr_mult * factor)
    if (unused := [pattern for pattern in tune.lr_multipliers if pattern not in used]) and context.stages is None:
        raise ConfigError(
            f'tune.lr_multipliers has "{unused[0]}", which names no parameter that is not named before; mt ckpt '
            "inspect --tensors lists the names"
        )
    return model


def first_match(name: str, patterns: Mapping[str, float]) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def _layer_factors(decay: float | None, layers: int | None) -> Callable[[str], float]:
    """name -> decay^(layers behind the parameter's)"""
    if decay is None or layers is None:
        return lambda name: 1.0

    def factor(name: str) -> float:
        if (layer := _LAYER.search(name)) is not None:
            return decay ** (layers - 1 - int(layer[1]))
        return decay**layers if _EMBEDDING.search(name) else 1.0

    return factor
