"""`grouped`: torch's grouped_mm, one kernel for all experts; on a GPU no number passes through the host."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_moe.experts.groups import Groups

ALIGNMENT = 16
"""Bytes that a row of each operand has to be a multiple of."""
SERVED = (torch.bfloat16, torch.float16, torch.float32)


def grouped_mm_objection(dtype: torch.dtype, sizes: tuple[int, ...]) -> str | None:
    """Why grouped_mm cannot multiply matrices with these numbers of rows and columns; None: it can."""
    if dtype not in SERVED:
        return f"it serves bf16, fp16 and fp32, not {str(dtype).removeprefix('torch.')}"
    multiple = ALIGNMENT // dtype.itemsize
    odd = [size for size in sizes if size % multiple]
    return f"the experts' sizes have to be multiples of {multiple}, and one is {odd[0]}" if odd else None


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups = groups
        return F.grouped_mm(x, weight.mT, offs=groups.ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad, ends = grads[0].contiguous(), ctx.groups.ends
        dx = F.grouped_mm(grad, weight, offs=ends) if ctx.needs_input_grad[0] else None
        dweight = F.grouped_mm(grad.T, x, offs=ends) if ctx.needs_input_grad[1] else None
        return dx, dweight, None


def grouped_product(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    return _GroupedProduct.apply(x, weight, groups)
