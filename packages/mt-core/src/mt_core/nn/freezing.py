"""Parameters that are not trained: the model transform of `train.frozen_parameters`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from mt_core.config.schema import Config
from mt_core.nn.build_context import ModelBuildContext


def freezes_parameters(config: Config) -> bool:
    return bool(config.train.frozen_parameters)


def freeze_parameters(model: nn.Module, config: Config, context: ModelBuildContext) -> nn.Module:
    """The model with the named parameters left out of training: they have no gradient and no state of the optimizer,
    and are stored like any other."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in module.named_parameters(recurse=False):
            if matched_patterns(prefix + name, config.train.frozen_parameters):
                parameter.requires_grad_(False)
                # Of a module of LayoutModule.declare: what the optimizer and checkpoints read.
                if name in (layouts := getattr(module, "layouts", {})):
                    layouts[name] = replace(layouts[name], trained=False)
    return model


def matched_patterns(name: str, patterns: Iterable[str]) -> list[str]:
    """Those that have the canonical name; * stands for any characters."""
    return [pattern for pattern in patterns if fnmatchcase(name, pattern)]
