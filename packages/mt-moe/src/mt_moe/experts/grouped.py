"""`grouped`: torch's grouped_mm. In bf16 on Hopper and Blackwell it is one CUTLASS kernel for all experts; elsewhere
torch multiplies one expert after another, and the host reads where their rows end."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_core._torch_compat import gradients_wanted
from mt_core.nn.main_grad import MainGrad, main_gradient_of
from mt_moe.experts import loop
from mt_moe.experts.loop import Groups
from mt_moe.kernels.availability import triton_objection

ALIGNMENT = 16
"""Alignment in bytes of a row of each operand."""
SERVED = (torch.bfloat16, torch.float16, torch.float32)
ONE_KERNEL = (9, 10)
"""Major compute capabilities of GPUs for which torch has that kernel."""


def grouped_mm_objection(dtype: torch.dtype, sizes: tuple[int, ...]) -> str | None:
    """Why grouped_mm cannot multiply matrices with these numbers of rows and columns; None if it can."""
    if dtype not in SERVED:
        return f"it serves bf16, fp16 and fp32, not {str(dtype).removeprefix('torch.')}"
    multiple = ALIGNMENT // dtype.itemsize
    odd = [size for size in sizes if size % multiple]
    return f"the experts' sizes have to be multiples of {multiple}, and one is {odd[0]}" if odd else None


def is_one_kernel(capability: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether grouped_mm on a GPU of this compute capability is one kernel, which the host does not wait for."""
    return dtype == torch.bfloat16 and capability[0] in ONE_KERNEL


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: Groups, main: MainGrad | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups, ctx.main = groups, main
        # [R, in] and [E, in, out] -> [R, out]
        return F.grouped_mm(x, weight.mT, offs=groups.ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        # Gradients may be expanded or transposed views, whose rows are not aligned.
        grad = grads[0].contiguous()
        wants_dx, wants_dweight = gradients_wanted(ctx, 2)
        dx = F.grouped_mm(grad, weight, offs=ctx.groups.ends) if wants_dx else None
        dweight = weight_gradient(grad, x, ctx.groups, ctx.main) if wants_dweight else None
        return dx, dweight, None, None


def grouped_product(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    return _GroupedProduct.apply(x, weight, groups, main_gradient_of(weight))


def weight_gradient(grad: Tensor, x: Tensor, groups: Groups, main: MainGrad | None) -> Tensor | None:
    """[R, out] and [R, in] -> outer products [E, out, in], or None if they were accumulated into main_grad."""
    if main is None or (grad.is_cuda and triton_objection("cuda") is not None):
        # [out, R] and [R, in], grouped along R -> [E, out, in]
        return F.grouped_mm(grad.T, x, offs=groups.ends)
    add_outer_products(main, grad, x, groups)
    return None


def add_outer_products(main: MainGrad, grad: Tensor, x: Tensor, groups: Groups) -> None:
    """[R, out] and [R, in], added to [E, out, in]. grouped_mm outputs 16 bits and cannot accumulate into fp32, so that
    another implementation does it."""
    if not grad.is_cuda:
        loop.add_outer_products(main, grad, x, groups)
        return
    from mt_moe.kernels.grouped_product import add_outer_products as add_in_one_kernel

    add_in_one_kernel(main, grad, x, groups.ends)
