"""Activations of the feed-forward block, by Megatron's and the field's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["gelu", "gelu_tanh", "relu", "squared_relu", "silu", "quick_gelu", "swiglu", "geglu", "geglu_tanh"]


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation that GPT-2 was trained with."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al., Primer, 2021)."""
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x) (Hendrycks and Gimpel, 2016), which CLIP was trained with."""
    return x * torch.sigmoid(1.702 * x)


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
    "squared_relu": squared_relu,
    "silu": F.silu,
    "quick_gelu": quick_gelu,
}

GATES: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": gelu_tanh}
"""Gated activations and what they do to the gate half (Shazeer, GLU Variants, 2020)."""


def is_gated(name: str) -> bool:
    return name in GATES


FUSED = frozenset({"swiglu", "geglu", "geglu_tanh", "squared_relu"})
"""Those that have kernels of their own."""


def activate(name: str, x: Tensor) -> Tensor:
    """Plain: [..., F] -> [..., F]. Gated: [..., 2F], gate half then up half -> [..., F]."""
    if name in PLAIN:
        return PLAIN[name](x)
    gate, up = x.chunk(2, dim=-1)
    return GATES[name](gate) * up
