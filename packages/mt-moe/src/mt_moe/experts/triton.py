"""`triton`: a Triton kernel for all experts. Any sizes; fp32, bf16 or fp16, accumulated in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_core._torch_compat import gradients_wanted
from mt_core.nn.main_grad import MainGrad, main_gradient_of
from mt_moe.experts.groups import Groups
from mt_moe.kernels.grouped_product import add_outer_products, outer_products, rows_times


class _TritonProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: Groups, main: MainGrad | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups, ctx.main = groups, main
        return rows_times(x, weight.mT, groups.ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        ends = ctx.groups.ends
        wants_dx, wants_dweight = gradients_wanted(ctx, 2)
        dx = rows_times(grads[0], weight, ends) if wants_dx else None
        dweight = _weight_gradient(grads[0], x, ends, ctx.main) if wants_dweight else None
        return dx, dweight, None, None


def _weight_gradient(grad: Tensor, x: Tensor, ends: Tensor, main: MainGrad | None) -> Tensor | None:
    """Outer products [E, out, in], or None if they were accumulated into main_grad."""
    if main is None:
        return outer_products(grad, x, ends)
    add_outer_products(main.total, grad, x, ends)
    return None


def triton_product(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    return _TritonProduct.apply(x, weight, groups, main_gradient_of(weight))
