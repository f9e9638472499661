"""Modules without memory for their weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Parameters of modules that are made in the block have shapes and no memory (device meta)."""
    with init_on_device(torch.device("meta"), include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device, include_buffers: bool | None = None) -> Iterator[None]:
    """Parameters of modules that are made in the block are on this device. include_buffers: also buffers, and whatever
    torch makes in the block."""
    if include_buffers:
        with device:
            yield
        return
    register = nn.Module.register_parameter

    def on_device(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            options: dict[str, Any] = {**parameter.__dict__, "requires_grad": parameter.requires_grad}
            module._parameters[name] = type(parameter)(parameter.to(device), **options)

    # For the duration of the block, as torch has no hook on the registration of single modules.
    nn.Module.register_parameter = on_device  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
