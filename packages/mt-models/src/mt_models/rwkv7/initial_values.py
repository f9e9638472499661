"""Initial values of RWKV-7's vectors, by channel and by layer, as in its authors' code for training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mt_core.nn.layout import Init


def _steps(tensor: Tensor) -> Tensor:
    """[C] from 0 to 1."""
    return torch.linspace(0.0, 1.0, len(tensor), device=tensor.device)


def _zigzag(channels: int, size: int, device: torch.device) -> Tensor:
    """[C]: within each head from -1 to 1, as x |x|."""
    half = max((size - 1) / 2, 0.5)
    x = (torch.arange(channels, device=device) % size - (size - 1) / 2) / half
    return x * x.abs()


def initial_mix(exponents: Sequence[float]) -> Init:
    """Row i: 1 - (c / C)^exponents[i] of channel c: the first channels read the position before."""

    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        shares = torch.arange(tensor.shape[-1], device=tensor.device) / tensor.shape[-1]
        for row, exponent in zip(tensor.view(len(exponents), -1), exponents, strict=True):
            row.copy_(1.0 - shares**exponent)

    return fill


def initial_decays(depth: float, size: int) -> Init:
    """Bias of the decays, from slow to fast along the channels. depth: from 0 at the first layer to 1 at the last."""

    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        slow = -6 + 6 * _steps(tensor) ** (1 + depth**0.3)
        tensor.copy_(slow + 0.5 + 2.5 * _zigzag(len(tensor), size, tensor.device))

    return fill


def initial_rates(size: int) -> Init:
    """Bias of the rates of removal."""

    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.copy_(-0.19 + 0.3 * _zigzag(len(tensor), size, tensor.device) + 0.4 * (_steps(tensor) - 0.5))

    return fill


def initial_value_mix(tensor: Tensor, generator: torch.Generator) -> None:
    """Bias of the mix with the values of the first layer."""
    tensor.copy_(0.73 - 0.4 * (_steps(tensor) - 0.5))


def initial_key_scales(tensor: Tensor, generator: torch.Generator) -> None:
    """Scales of the keys that are looked up."""
    tensor.copy_(0.71 - 0.1 * (_steps(tensor) - 0.5))
