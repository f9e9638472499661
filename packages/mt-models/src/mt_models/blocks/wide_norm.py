"""RMSNorm over all heads of a position together, sharded by heads over tensor-parallel ranks."""

from __future__ import annotations

from torch import Tensor

from mt_core.nn.layout import LayoutModule, ParameterLayout, Split, ones
from mt_core.parallel.collectives import copy_to, reduce_from
from mt_core.parallel.context import ParallelContext


class WideRMSNorm(LayoutModule):
    """x / sqrt(mean(x^2) + eps) * weight, the mean over heads and channels [..., heads, size] in fp32.

    weight: [heads * size], sharded over tp as the heads are.
    """

    weight: Tensor

    def __init__(self, heads: int, size: int, eps: float, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.eps, self.width = eps, heads * size
        self.declare("weight", ParameterLayout((heads * size,), ones, (Split(dim=0, axis="tp"),)))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, heads of this rank, size] -> the same"""
        # [B, S, heads of this rank * size]
        wide = x.float().flatten(-2)
        # Each rank uses the all-reduced sum for its own heads, so that its gradient has to be all-reduced too.
        squares = copy_to(reduce_from(wide.square().sum(-1, keepdim=True), self.ctx.tp), self.ctx.tp)
        # `width` counts the channels of all ranks; squares [B, S, 1].
        normed = wide * (squares / self.width + self.eps).rsqrt() * self.weight.float()
        return normed.to(x.dtype).view_as(x)
