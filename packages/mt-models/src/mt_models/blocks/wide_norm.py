"""RMSNorm over all heads of a position together, sharded by heads over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.layout import LayoutModule, ParameterLayout, Split, ones
from mt_core.nn.norm import plain_rms_norm
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
        self.kernel: Callable[..., Tensor] = plain_rms_norm
        self.declare("weight", ParameterLayout((heads * size,), ones, (Split(dim=0, axis="tp"),)))

    def use_kernels(self, kernels: Kernels) -> None:
        if self.ctx.tp.size == 1:
            self.kernel = kernels.pick("rms_norm", width=self.width, plain=plain_rms_norm)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, heads of this rank, size] -> the same"""
        wide = x.flatten(-2)  # [B, S, heads of this rank * size]
        normed = self.kernel(wide, self.weight, self.eps) if self.ctx.tp.size == 1 else self._over_ranks(wide)
        return normed.view_as(x)

    def _over_ranks(self, x: Tensor) -> Tensor:
        wide = x.float()
        # Each rank uses the all-reduced sum for its own heads, so that its gradient has to be all-reduced too.
        squares = copy_to(reduce_from(wide.square().sum(-1, keepdim=True), self.ctx.tp), self.ctx.tp)
        # `width` counts the channels of all ranks; squares [B, S, 1].
        return (wide * (squares / self.width + self.eps).rsqrt() * self.weight.float()).to(x.dtype)
