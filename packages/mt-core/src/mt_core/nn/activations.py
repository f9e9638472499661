"""Activations of the feed-forward block, by Megatron's and the field's names."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


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

CLAMP = 7.0
"""The largest gate, and the largest magnitude of the other half, that clamped_swiglu distinguishes."""


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """quick_gelu(min(gate, 7)) (clip(up, -7, 7) + 1), of GPT-OSS (OpenAI, 2025)."""
    return quick_gelu(gate.clamp(max=CLAMP)) * (up.clamp(-CLAMP, CLAMP) + 1)


LIMIT = 10.0
"""The same of limited_swiglu."""


def limited_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(min(gate, 10)) clip(up, -10, 10), of DeepSeek-V4 (DeepSeek, 2026)."""
    return F.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)


GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu": lambda gate, up: F.gelu(gate) * up,
    "geglu_tanh": lambda gate, up: gelu_tanh(gate) * up,
    "clamped_swiglu": clamped_swiglu,
    "limited_swiglu": limited_swiglu,
}
"""Gated activations of the gate half and the other one (Shazeer, GLU Variants, 2020)."""


def is_gated(name: str) -> bool:
    return name in GATED


FUSED = frozenset({"swiglu", "geglu", "geglu_tanh", "clamped_swiglu", "squared_relu"})
"""Those that have kernels of their own."""


def activate(name: str, x: Tensor) -> Tensor:
    """Plain: [..., F] -> [..., F]. Gated: [..., 2F], gate half then up half -> [..., F]."""
    if name in PLAIN:
        return PLAIN[name](x)
    gate, up = x.chunk(2, dim=-1)
    return GATED[name](gate, up)
