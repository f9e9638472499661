"""Norms that are not in mt_core."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.kernels.reference.layers import rms_norm
from mt_core.nn.layout import ParameterLayout, zeros
from mt_core.nn.linear import sequence_axes
from mt_core.nn.norm import Norm
from mt_core.parallel.context import AxisName, ParallelContext


class ZeroCenteredRMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * (1 + weight) over the last dimension, in fp32 (Gemma).

    per_head: the norm is over each head [..., heads, size] instead of the residual stream. The weight's gradient is
    then partial over tp because ranks have different heads; otherwise because sequence parallelism gives them
    different positions.
    """

    kernel_name = "rms_norm"
    weight: Tensor

    def __init__(self, size: int, eps: float, ctx: ParallelContext, *, per_head: bool = False) -> None:
        super().__init__(ctx)
        self.eps = eps
        self.kernel = rms_norm
        # The weight is replicated, its gradient is not: it has to be summed over the ranks in these axes.
        heads: tuple[AxisName, ...] = ("tp",) if ctx.tp.size > 1 else ()
        self.declare(
            "weight", ParameterLayout((size,), zeros, partial_gradient=heads if per_head else sequence_axes(ctx))
        )

    def use_kernels(self, kernels: Kernels) -> None:
        self.kernel = kernels.pick("rms_norm", "zero_centered", width=len(self.weight))
        self.add_kernel = kernels.pick_fused("rms_norm", "zero_centered", width=len(self.weight))

    def operands(self) -> tuple[Any, ...]:
        return self.weight, self.eps, True
