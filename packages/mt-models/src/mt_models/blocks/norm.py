"""Norms beside those of mt_core."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.layout import LayoutModule, ParameterLayout, zeros
from mt_core.nn.linear import sequence_axes
from mt_core.parallel.context import AxisName, ParallelContext


class ZeroCenteredRMSNorm(LayoutModule):
    """x / sqrt(mean(x^2) + eps) * (1 + weight) over the last dimension, in fp32 (Gemma).

    per_head: the norm is over each head [..., heads, size] and not over the residual stream; then tensor
    parallelism gives every rank other heads instead of sequence parallelism other positions.
    """

    weight: Tensor

    def __init__(self, size: int, eps: float, ctx: ParallelContext, *, per_head: bool = False) -> None:
        super().__init__(ctx)
        self.eps = eps
        heads: tuple[AxisName, ...] = ("tp",) if ctx.tp.size > 1 else ()
        self.declare(
            "weight", ParameterLayout((size,), zeros, partial_gradient=heads if per_head else sequence_axes(ctx))
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)
