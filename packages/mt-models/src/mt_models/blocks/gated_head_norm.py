"""RMSNorm of each head times an activation of a gate, as gated delta nets and Kimi delta attention end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.batch_invariance import is_batch_invariant
from mt_core.nn.layout import LayoutModule, ParameterLayout, ones
from mt_core.parallel.context import ParallelContext


class GatedHeadNorm(LayoutModule):
    """weight * x / sqrt(mean(x^2) + eps) * activation(gate) over each head [..., heads, size]; gate and mean in
    fp32."""

    weight: Tensor

    def __init__(self, size: int, eps: float, activation: Callable[[Tensor], Tensor], ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.eps, self.activation = eps, activation
        # One weight for all heads: each rank's gradient is that of its own heads.
        self.declare("weight", ParameterLayout((size,), ones, partial_gradient=("tp",) if ctx.tp.size > 1 else ()))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate [..., heads, size] -> the same, in the dtype of x"""
        # In one dtype there is nothing to round between the factors, and gradients by hand are half as many passes.
        single = x.dtype == gate.dtype == self.weight.dtype == torch.float32
        if single and self.activation is F.silu and not is_batch_invariant():
            y: Tensor = _SiluGatedNorm.apply(x, gate, self.weight, self.eps)
            return y
        normed = F.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype) * self.weight
        return (normed * self.activation(gate.float())).to(x.dtype)


class Fp32GatedHeadNorm(GatedHeadNorm):
    """The same, all in fp32."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
        return (normed * self.activation(gate.float())).to(x.dtype)


class _SiluGatedNorm(torch.autograd.Function):
    """y = x r w s with r = 1 / sqrt(mean(x^2) + eps) and s = silu(gate)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, gate, weight, inverse)
        return (x * inverse).mul_(weight).mul_(F.silu(gate))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (dy,), (x, gate, weight, inverse) = grads, ctx.saved_tensors
        normed = x * inverse
        product = dy * normed
        dgate = torch.ops.aten.silu_backward(product * weight, gate)
        activated = F.silu(gate)
        dweight = product.mul_(activated).flatten(0, -2).sum(0)
        dnormed = activated.mul_(dy).mul_(weight)
        # The mean of dnormed * normed is that of product * weight.
        mean = (product @ weight)[..., None].div_(x.shape[-1])
        return dnormed.addcmul_(normed, mean, value=-1.0).mul_(inverse), dgate, dweight, None
