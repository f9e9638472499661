"""`loop`: one matrix product after another, written into one tensor; in one call where experts have equal numbers of
rows. The reference for the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mt_moe.experts.groups import Groups


class _LoopProduct(torch.autograd.Function):
    """One node for all experts: selecting each one's matrix in the graph would make a gradient of the size of all
    of them for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups = groups
        return _times(x, weight.mT, groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        dx = _times(grad, weight, ctx.groups) if ctx.needs_input_grad[0] else None
        dweight = outer_products(grad, x, ctx.groups) if ctx.needs_input_grad[1] else None
        return dx, dweight, None


def _times(x: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """[R, a] and [E, a, b] -> [R, b]"""
    if groups.even is not None:
        return torch.bmm(x.unflatten(0, (len(matrices), groups.even)), matrices).flatten(0, 1)
    out = x.new_empty(len(x), matrices.shape[2])
    for matrix, (first, end) in zip(matrices, groups.bounds, strict=True):
        if end > first:
            torch.mm(x[first:end], matrix, out=out[first:end])
    return out


def outer_products(grad: Tensor, x: Tensor, groups: Groups) -> Tensor:
    """[R, out] and [R, in] -> [E, out, in]; zeros for an expert without rows."""
    if groups.even is not None:
        by_expert = (len(groups.counts), groups.even)
        return torch.bmm(grad.unflatten(0, by_expert).mT, x.unflatten(0, by_expert))
    found = x.new_empty(len(groups.counts), grad.shape[1], x.shape[1])
    for matrix, (first, end) in zip(found, groups.bounds, strict=True):
        torch.mm(grad[first:end].T, x[first:end], out=matrix)
    return found


def loop_product(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    return _LoopProduct.apply(x, weight, groups)
