"""Freezes parts of a model."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from mt_core.nn.layout import LayoutModule


def freeze(module: nn.Module) -> None:
    """Disable gradients of the module's parameters; they are saved and resumed like all others."""
    for part in module.modules():
        if isinstance(part, LayoutModule):
            # The layouts state it too: checkpoints and the run's summary read it there.
            part.layouts = {name: replace(layout, trained=False) for name, layout in part.layouts.items()}
    module.requires_grad_(False)
