"""Norms of an MoE layer whose experts work on a latent of the tokens: of the latent, and of the output of each expert
(Muse Spark, 2026)."""

from __future__ import annotations

import torch
from torch import Tensor

from mt_core.nn.kernels.reference.layers import rms_norm, scaled_rms_norm
from mt_core.nn.layout import LayoutModule, ParameterLayout, zeros
from mt_core.parallel.collectives import copy_to, reduce_from
from mt_core.parallel.context import ParallelContext
from mt_moe.experts.loop import Groups
from mt_moe.tokens import partial_gradient_axes


class LatentNorm(LayoutModule):
    """x / sqrt(mean(x^2) + eps) * (1 + weight) of this rank's tokens [T, latent], in fp32.

    weight [latent]: replicated, its gradient partial over tp.
    """

    weight: Tensor

    def __init__(self, size: int, eps: float, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.eps = eps
        self.declare("weight", ParameterLayout((size,), zeros, partial_gradient=partial_gradient_axes(ctx)))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, zero_centered=True)


class ExpertOutputNorm(LayoutModule):
    """The norm of y = x * (1 + weight), in fp32, of each row of the experts' outputs, times the weight that the router
    gave it. All experts share weight [latent].

    Every row is on one rank, or on the ranks of one etp group: the gradient of the weight is partial over tp, as that
    of parameters which ranks apply to their own tokens.
    """

    weight: Tensor

    def __init__(self, size: int, eps: float, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.eps = eps
        self.declare("weight", ParameterLayout((size,), zeros, partial_gradient=partial_gradient_axes(ctx)))

    def forward(self, rows: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        """rows [R, latent], with etp this rank's partial sums; weights [R] -> [R, latent], to be summed over etp."""
        etp = self.ctx.axis("etp")
        # Values and gradients of rows that belong to no expert are undefined, and would be in the gradient of `weight`.
        present = groups.present(len(rows))[:, None]
        # A norm needs whole rows. Only the first etp rank passes them on, whose gradient all ranks need.
        whole = copy_to(reduce_from(torch.where(present, rows, 0), etp), etp)
        normed = scaled_rms_norm(whole, self.weight, self.eps) * (weights * float(etp.rank == 0))[:, None]
        return torch.where(present, normed, 0).to(rows.dtype)
