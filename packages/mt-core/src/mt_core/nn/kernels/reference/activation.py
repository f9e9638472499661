"""Activations of the feed-forward that are worth a kernel: the gated ones and the squared ReLU."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from mt_core.nn.activations import activate
from mt_core.nn.kernels.reference.accumulation import widened

FusedActivation = Literal["swiglu", "geglu", "geglu_tanh", "clamped_swiglu", "squared_relu"]


def activation(x: Tensor, bias: Tensor | None, name: FusedActivation) -> Tensor:
    """The activation of x + bias, in x's dtype; computed in fp32 or wider.

    Gated: x [..., 2F] and bias [2F], gate half then up half -> [..., F]. squared_relu: [..., F] -> [..., F].
    """
    # The bias is added in fp32, so the sum is not rounded before the activation.
    wide = widened(x) if bias is None else widened(x) + widened(bias)
    return activate(name, wide).to(x.dtype)
