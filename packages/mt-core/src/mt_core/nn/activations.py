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


def limited_swiglu(gate: Tensor, up: Tensor, limit: float = LIMIT) -> Tensor:
    """silu(min(gate, limit)) clip(up, -limit, limit), of DeepSeek-V4 (DeepSeek, 2026)."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu": lambda gate, up: F.gelu(gate) * up,
    "geglu_tanh": lambda gate, up: gelu_tanh(gate) * up,
    "clamped_swiglu": clamped_swiglu,
    "limited_swiglu": limited_swiglu,
}
"""Gated activations of the gate half and the other one (Shazeer, GLU Variants, 2020)."""


CAPPED = "capped_swiglu:"
"""Before its limit, the name of the activation `capped_swiglu`: that of a layer, from the keys of its family."""


def capped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """min(silu(gate), limit) clip(up, -limit, limit), of Ling 3.0 (inclusionAI, 2026)."""
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


LIMITED = "limited_swiglu:"
"""The same before another limit of `limited_swiglu` than 10 (GLM-5.3-Flash)."""


SITU = "situ:"
"""Before its two bounds with a comma between them, the name of the activation `situ`, from the keys of its family."""


def situ(gate: Tensor, up: Tensor, gate_bound: float, up_bound: float) -> Tensor:
    """b tanh(gate / b) sigmoid(gate) c tanh(up / c) of the bounds b and c, in fp32, of Kimi K3 (Moonshot AI, 2026)."""
    wide, other = gate.float(), up.float()
    bounded = gate_bound * torch.tanh(wide / gate_bound) * torch.sigmoid(wide)
    return (bounded * (up_bound * torch.tanh(other / up_bound))).to(gate.dtype)


def is_gated(name: str) -> bool:
    return name in GATED or name.startswith((CAPPED, LIMITED, SITU))


FUSED = frozenset({"swiglu", "geglu", "geglu_tanh", "clamped_swiglu", "squared_relu"})
"""Those that have kernels of their own."""


def activate(name: str, x: Tensor) -> Tensor:
    """Plain: [..., F] -> [..., F]. Gated: [..., 2F], gate half then up half -> [..., F]."""
    if name in PLAIN:
        return PLAIN[name](x)
    gate, up = x.chunk(2, dim=-1)
    if name.startswith(CAPPED):
        return capped_swiglu(gate, up, float(name.removeprefix(CAPPED)))
    if name.startswith(LIMITED):
        return limited_swiglu(gate, up, float(name.removeprefix(LIMITED)))
    if name.startswith(SITU):
        gate_bound, up_bound = map(float, name.removeprefix(SITU).split(","))
        return situ(gate, up, gate_bound, up_bound)
    return GATED[name](gate, up)
