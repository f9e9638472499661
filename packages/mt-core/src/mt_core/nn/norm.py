"""LayerNorm and RMSNorm. Statistics are taken in fp32 whatever the dtype of the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.kernels.request import KernelName
from mt_core.nn.layout import LayoutModule, ParameterLayout, ones, sequence_axes, zeros
from mt_core.parallel.context import AxisName, ParallelContext

Normalization = Literal["LayerNorm", "RMSNorm"]


class Norm(LayoutModule):
    """A norm over the last dimension. add_kernel: its kernel's form `fused`, if that has one."""

    kernel_name: ClassVar[KernelName]
    kernel: Callable[..., Tensor]
    add_kernel: Callable[..., tuple[Tensor, ...]] | None = None

    def operands(self) -> tuple[Any, ...]:
        """What the kernels take after their tensors of activations."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(x, *self.operands())

    def add(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(x + branch, the norm of it): the residual stream behind a block, and the next block's input. Without a
        branch: (x, the norm of x), to be used in place of x where x is needed again.
        """
        if self.add_kernel is not None:
            x, normed = self.add_kernel(x, branch, *self.operands())
            return x, normed
        # The stream keeps its dtype, whatever the branch was computed in.
        x = x if branch is None else (x + branch).to(x.dtype)
        # Without the fused form two operations, whose gradients of x autograd adds.
        return x, self(x)


class LayerNorm(Norm):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension (Ba et al., 2016)."""

    kernel_name = "layer_norm"
    weight: Tensor
    bias: Tensor

    def __init__(self, size: int, eps: float, ctx: ParallelContext, partial: tuple[AxisName, ...] = ()) -> None:
        super().__init__(ctx)
        self.eps = eps
        self.kernel = plain_layer_norm
        self.declare("weight", ParameterLayout((size,), ones, partial_gradient=partial))
        self.declare("bias", ParameterLayout((size,), zeros, partial_gradient=partial))

    def use_kernels(self, kernels: Kernels) -> None:
        self.kernel = kernels.pick("layer_norm", width=len(self.weight), plain=plain_layer_norm)
        self.add_kernel = kernels.pick_fused("layer_norm", width=len(self.weight))

    def operands(self) -> tuple[Any, ...]:
        return self.weight, self.bias, self.eps


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019)."""

    kernel_name = "rms_norm"
    weight: Tensor

    def __init__(self, size: int, eps: float, ctx: ParallelContext, partial: tuple[AxisName, ...] = ()) -> None:
        super().__init__(ctx)
        self.eps = eps
        self.kernel = plain_rms_norm
        self.declare("weight", ParameterLayout((size,), ones, partial_gradient=partial))

    def use_kernels(self, kernels: Kernels) -> None:
        self.kernel = kernels.pick("rms_norm", width=len(self.weight), plain=plain_rms_norm)
        self.add_kernel = kernels.pick_fused("rms_norm", width=len(self.weight))

    def operands(self) -> tuple[Any, ...]:
        return self.weight, self.eps


def plain_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """torch's own kernel, which keeps x in its dtype for the backward pass."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def build_norm(kind: Normalization, size: int, eps: float, ctx: ParallelContext) -> Norm:
    """A norm over the residual stream, which sequence parallelism shards along the sequence."""
    return _norm_type(kind)(size, eps, ctx, sequence_axes(ctx))


def build_head_norm(kind: Normalization, size: int, eps: float, ctx: ParallelContext) -> Norm:
    """A norm over each head [..., heads, size]; tensor parallelism gives every rank other heads."""
    # One weight for all heads: each rank's gradient is that of its own heads.
    return _norm_type(kind)(size, eps, ctx, ("tp",) if ctx.tp.size > 1 else ())


def _norm_type(kind: Normalization) -> type[LayerNorm] | type[RMSNorm]:
    return LayerNorm if kind == "LayerNorm" else RMSNorm
