"""Parts of a model that training leaves as they are."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from mt_core.nn.layout import LayoutModule


def freeze(module: nn.Module) -> None:
    """No parameter of the module is trained; all are stored and resumed like any other."""
    for part in module.modules():
        if isinstance(part, LayoutModule):
            part.layouts = {name: replace(layout, trained=False) for name, layout in part.layouts.items()}
    module.requires_grad_(False)
