"""`triton`: a Triton kernel for all experts. Any sizes; fp32, bf16 or fp16, accumulated in fp32.

With an order of rows, tokens are gathered while they are loaded and results are scattered while they are stored,
forward and backward. Saved for the backward pass are then the tokens, and not a row for each of their experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_core._torch_compat import gradients_wanted
from mt_core.nn.main_grad import MainGrad, main_gradient_of
from mt_moe.experts.loop import Groups
from mt_moe.kernels.grouped_product import add_outer_products, outer_products, rows_times
from mt_moe.permutation import RowOrder


class _TritonProduct(torch.autograd.Function):
    """read: the order in which rows of x are read; written: the one in which results go back to tokens; or None."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        groups: Groups,
        main: MainGrad | None,
        read: RowOrder | None,
        written: RowOrder | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups, ctx.main, ctx.read, ctx.written = groups, main, read, written
        return _times(x, weight.mT, groups, read, written)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        x, weight = ctx.saved_tensors
        wants_dx, wants_dweight = gradients_wanted(ctx, 2)
        # The orders change places: the gradient is read where the result was written, and written where x was read.
        dx = _times(grads[0], weight, ctx.groups, ctx.written, ctx.read) if wants_dx else None
        dweight = None
        if wants_dweight:
            dweight = _weight_gradient(grads[0], x, ctx.groups.ends, ctx.main, ctx.written, ctx.read)
        return dx, dweight, None, None, None, None


def _times(x: Tensor, matrices: Tensor, groups: Groups, read: RowOrder | None, written: RowOrder | None) -> Tensor:
    """x [R, a] or, read in an order, [n, a]; matrices [E, a, b] -> [R, b], or summed for each token [n, b]"""
    gather = None if read is None else read.tokens
    if written is None:
        return rows_times(x, matrices, groups.ends, gather=gather)
    if not written.permutation.complete:  # room for each copy of each token could be much more than there are rows
        return written.unpermute(rows_times(x, matrices, groups.ends, gather=gather))
    # [n * copies, b]: the kernel writes row r to the place of its (token, copy), so that the sum below runs over
    # neighbours and in a fixed order.
    copies = x.new_empty(len(written.permutation.inverse), matrices.shape[2])
    rows_times(x, matrices, groups.ends, gather=gather, scatter=written.permutation.order, out=copies)
    return copies if written.copies == 1 else copies.unflatten(0, (-1, written.copies)).sum(1)


def _weight_gradient(
    grad: Tensor, x: Tensor, ends: Tensor, main: MainGrad | None, of_grad: RowOrder | None, of_x: RowOrder | None
) -> Tensor | None:
    """Outer products [E, out, in], or None if they were accumulated into main_grad."""
    rows_of_grad = None if of_grad is None else of_grad.tokens
    rows_of_x = None if of_x is None else of_x.tokens
    if main is None:
        return outer_products(grad, x, ends, left_gather=rows_of_grad, right_gather=rows_of_x)
    add_outer_products(main, grad, x, ends, left_gather=rows_of_grad, right_gather=rows_of_x)
    return None


class TritonProduct:
    """See mt_moe.experts.loop.PermutingProduct."""

    def __call__(self, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        return _TritonProduct.apply(x, weight, groups, main_gradient_of(weight), None, None)

    def of_tokens(self, x: Tensor, weight: Tensor, groups: Groups, order: RowOrder) -> Tensor:
        return _TritonProduct.apply(x, weight, groups, main_gradient_of(weight), order, None)

    def to_tokens(self, x: Tensor, weight: Tensor, groups: Groups, order: RowOrder) -> Tensor:
        return _TritonProduct.apply(x, weight, groups, main_gradient_of(weight), None, order)
