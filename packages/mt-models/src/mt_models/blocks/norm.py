"""Norms that are not in mt_core: zero-centered (Gemma), without a bias (ModernBERT), over all heads together (OLMoE),
gated (Mamba-2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.kernels.reference.layers import rms_norm
from mt_core.nn.layout import LayoutModule, ParameterLayout, Split, ones, zeros
from mt_core.nn.linear import sequence_axes
from mt_core.nn.norm import Norm, plain_layer_norm, plain_rms_norm
from mt_core.parallel.collectives import copy_to, reduce_from
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


class BiasFreeLayerNorm(Norm):
    """(x - mean) / sqrt(var + eps) * weight over the last dimension, of the residual stream (ModernBERT)."""

    kernel_name = "layer_norm"
    weight: Tensor

    def __init__(self, size: int, eps: float, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.eps = eps
        # torch's own: the kernels take a bias too.
        self.kernel = plain_layer_norm
        self.declare("weight", ParameterLayout((size,), ones, partial_gradient=sequence_axes(ctx)))

    def operands(self) -> tuple[Any, ...]:
        return self.weight, None, self.eps


class ScaleFreeRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) over the last dimension, in fp32, without a weight."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)


# -- over all heads of a position together, sharded by heads -----------------------------------------


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


# -- gated, at the end of a Mamba-2 mixer ------------------------------------------------------------


class GatedRMSNorm(LayoutModule):
    """RMSNorm of x * silu(gate), the mean square over each of `groups` equal parts of the channels, in fp32.

    Tensor parallelism gives each rank whole groups. (The norm is applied after the gate: norm_before_gate=False.)
    """

    weight: Tensor

    def __init__(self, size: int, groups: int, eps: float, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.group_size, self.eps = size // groups, eps
        self.declare("weight", ParameterLayout((size,), ones, (Split(dim=0, axis="tp"),)))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate [..., channels of this rank]"""
        # [..., C] -> [..., groups of this rank, C / groups]. Whole groups: the mean square needs no all-reduce over tp.
        gated = (x.float() * F.silu(gate.float())).unflatten(-1, (-1, self.group_size))
        normed = F.rms_norm(gated, (self.group_size,), eps=self.eps).flatten(-2)
        return (normed * self.weight.float()).to(x.dtype)


# -- with a weight in fp32, whatever the dtype of the model ------------------------------------------


class Float32RMSNorm(LayoutModule):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32, with a weight in fp32 (DeepSeek-V4). On the
    residual stream, which sequence parallelism shards."""

    weight: Tensor

    def __init__(self, size: int, eps: float, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.eps = eps
        layout = ParameterLayout((size,), ones, partial_gradient=sequence_axes(ctx), dtype=torch.float32)
        self.declare("weight", layout)

    def forward(self, x: Tensor) -> Tensor:
        return plain_rms_norm(x, self.weight, self.eps)
