"""`triton`: a Triton kernel for all experts. Any sizes and fp32, bf16 or fp16; sums in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mt_moe.experts.groups import Groups
from mt_moe.kernels.grouped_product import outer_products, rows_times


class _TritonProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups = groups
        return rows_times(x, weight.mT, groups.ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        ends = ctx.groups.ends
        dx = rows_times(grads[0], weight, ends) if ctx.needs_input_grad[0] else None
        dweight = outer_products(grads[0], x, ends) if ctx.needs_input_grad[1] else None
        return dx, dweight, None


def triton_product(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    return _TritonProduct.apply(x, weight, groups)
