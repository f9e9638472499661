"""LayerNorm and RMSNorm. Statistics are taken in fp32 whatever the number format of the input."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn.layout import LayoutModule, ParameterLayout, ones, zeros
from mt_core.parallel.context import ParallelContext

Normalization = Literal["LayerNorm", "RMSNorm"]


class LayerNorm(LayoutModule):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension (Ba et al., 2016)."""

    weight: Tensor
    bias: Tensor

    def __init__(self, size: int, eps: float, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.eps = eps
        self.declare("weight", ParameterLayout((size,), ones))
        self.declare("bias", ParameterLayout((size,), zeros))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(LayoutModule):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019)."""

    weight: Tensor

    def __init__(self, size: int, eps: float, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.eps = eps
        self.declare("weight", ParameterLayout((size,), ones))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def build_norm(kind: Normalization, size: int, eps: float, ctx: ParallelContext) -> nn.Module:
    return LayerNorm(size, eps, ctx) if kind == "LayerNorm" else RMSNorm(size, eps, ctx)
