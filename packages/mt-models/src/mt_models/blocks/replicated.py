"""A linear layer that is replicated on every tensor-parallel rank: the small matrices of heads."""

from __future__ import annotations

from torch import Tensor

from mt_core.nn.layout import Init, ParameterLayout, sequence_axes, zeros
from mt_core.nn.linear import Cut, LinearModule, linear
from mt_core.parallel.context import AxisName, ParallelContext


class ReplicatedLinear(LinearModule):
    """y = x W^T + b, W [out, in].

    on_sequence: it is applied to the residual stream, which sequence parallelism shards, so that each rank's
    gradient is partial, from its own positions.
    """

    cut: Cut = "none"
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        ctx: ParallelContext,
        *,
        init: Init,
        bias: bool = True,
        on_sequence: bool = False,
    ) -> None:
        super().__init__(ctx)
        self.multiply = whole_linear
        # Without on_sequence every rank has all positions and computes the
        # whole gradient: summing it would multiply it.
        partial: tuple[AxisName, ...] = sequence_axes(ctx) if on_sequence else ()
        self.declare("weight", ParameterLayout((out_features, in_features), init, partial_gradient=partial))
        self.declare("bias", ParameterLayout((out_features,), zeros, partial_gradient=partial) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return self.multiply(x, self.weight, self.bias, self.ctx)


def whole_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ctx: ParallelContext) -> Tensor:
    """x W^T + b on every rank."""
    return linear(x, weight, bias)
