"""Rows in the order of experts, and `loop`, the reference implementation of their product: one GEMM per expert, written
into one tensor; one batched GEMM if all experts have the same number of rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_core._torch_compat import gradients_wanted
from mt_core.nn.main_grad import MainGrad, main_gradient_of
from mt_moe.permutation import RowOrder

# -- rows in the order of experts, and the interface of the grouped GEMM -----------------------------


class Groups:
    """counts: [E] int64, the rows of each expert. The rows of one expert are consecutive; further rows belong to none,
    and what products give for them is undefined."""

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """First row and end of each expert. Synchronizes with the device."""
        ends = self.counts.cumsum(0).tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))

    @cached_property
    def even(self) -> int | None:
        """Rows of each expert if all have the same number, as with padding to capacity; else None. Synchronizes."""
        sizes = {end - first for first, end in self.bounds}
        return sizes.pop() if len(sizes) == 1 else None

    @cached_property
    def ends(self) -> Tensor:
        """[E] int32, the end of each expert's rows, on the device."""
        return self.counts.cumsum(0).to(torch.int32)

    def numbers(self, rows: int) -> Tensor:
        """[rows] int64, the expert of each row; the last one for rows that belong to none."""
        positions = torch.arange(rows, device=self.counts.device)
        # right=True: position ends[e] belongs to expert e + 1, and empty experts are passed over.
        return torch.searchsorted(self.counts.cumsum(0), positions, right=True).clamp(max=len(self.counts) - 1)

    def present(self, rows: int) -> Tensor:
        """[rows] bool, whether each row belongs to an expert."""
        return torch.arange(rows, device=self.counts.device) < self.counts.sum()


GroupedProduct = Callable[[Tensor, Tensor, Groups], Tensor]
"""(x [R, in], weight [E, out, in], groups) -> [R, out], the rows of expert e times weight[e]^T. Differentiable."""


@runtime_checkable
class PermutingProduct(Protocol):
    """A GroupedProduct that permutes rows while it loads and stores them, so that no permuted copy exists."""

    def __call__(self, x: Tensor, weight: Tensor, groups: Groups) -> Tensor: ...

    def of_tokens(self, x: Tensor, weight: Tensor, groups: Groups, order: RowOrder) -> Tensor:
        """x [n, in] -> [R, out]: the product of order.permute(x)"""
        ...

    def to_tokens(self, x: Tensor, weight: Tensor, groups: Groups, order: RowOrder) -> Tensor:
        """x [R, in] -> [n, out]: order.unpermute of the product"""
        ...


class _LoopProduct(torch.autograd.Function):
    """One autograd node for all experts. Selecting each expert's matrix in the graph would allocate, for each expert, a
    gradient of the size of all of them.

    read: the order in which rows of x are read; written: the one in which results go back to tokens; or None."""

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
        # weight.mT: [E, in, out], a view.
        return _to_tokens(_times(_to_rows(x, read), weight.mT, groups), written)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        x, weight = ctx.saved_tensors
        # The gradient of order.unpermute is order.permute, and the reverse below.
        grad = _to_rows(grads[0].contiguous(), ctx.written)
        wants_dx, wants_dweight = gradients_wanted(ctx, 2)
        # [R, out] times [E, out, in] -> [R, in]
        dx = _to_tokens(_times(grad, weight, ctx.groups), ctx.read) if wants_dx else None
        dweight = weight_gradient(grad, _to_rows(x, ctx.read), ctx.groups, ctx.main) if wants_dweight else None
        return dx, dweight, None, None, None, None


def _to_rows(x: Tensor, order: RowOrder | None) -> Tensor:
    return x if order is None else order.permute(x)


def _to_tokens(x: Tensor, order: RowOrder | None) -> Tensor:
    return x if order is None else order.unpermute(x)


def _times(x: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """[R, a] and [E, a, b] -> [R, b]"""
    even = _even_rows(x, groups)
    if even is not None:
        # [E, rows, a] and [E, a, b]
        return torch.bmm(x.unflatten(0, (len(matrices), even)), matrices).flatten(0, 1)
    out = x.new_empty(len(x), matrices.shape[2])
    for matrix, (first, end) in zip(matrices, groups.bounds, strict=True):
        if end > first:
            torch.mm(x[first:end], matrix, out=out[first:end])
    return out


def _even_rows(x: Tensor, groups: Groups) -> int | None:
    """Rows of each expert if all have the same number and no row of x belongs to none; else None."""
    even = groups.even
    return even if even is not None and even * len(groups.counts) == len(x) else None


def weight_gradient(grad: Tensor, x: Tensor, groups: Groups, main: MainGrad | None) -> Tensor | None:
    """Outer products [E, out, in], or None if they were accumulated into main_grad."""
    if main is None:
        return outer_products(grad, x, groups)
    add_outer_products(main, grad, x, groups)
    return None


def outer_products(grad: Tensor, x: Tensor, groups: Groups) -> Tensor:
    """[R, out] and [R, in] -> [E, out, in]; zeros for an expert without rows."""
    even = _even_rows(x, groups)
    if even is not None:
        by_expert = (len(groups.counts), even)
        return torch.bmm(grad.unflatten(0, by_expert).mT, x.unflatten(0, by_expert))
    weight_grad = x.new_empty(len(groups.counts), grad.shape[1], x.shape[1])
    for matrix, (first, end) in zip(weight_grad, groups.bounds, strict=True):
        # An empty product writes zeros, so `found` needs no initialization.
        torch.mm(grad[first:end].T, x[first:end], out=matrix)
    return weight_grad


def add_outer_products(main: MainGrad, grad: Tensor, x: Tensor, groups: Groups) -> None:
    """[R, out] and [R, in], added to [E, out, in]."""
    for matrix, (first, end) in zip(main.matrices(), groups.bounds, strict=True):
        if end > first:
            matrix.add_product(grad[first:end], x[first:end])


def loop_product(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    return _LoopProduct.apply(x, weight, groups, main_gradient_of(weight), None, None)


class PermutingLoop:
    """See mt_moe.experts.loop.PermutingProduct: keeps what the Triton kernel keeps, and is planned in its place."""

    def __call__(self, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        return loop_product(x, weight, groups)

    def of_tokens(self, x: Tensor, weight: Tensor, groups: Groups, order: RowOrder) -> Tensor:
        return _LoopProduct.apply(x, weight, groups, main_gradient_of(weight), order, None)

    def to_tokens(self, x: Tensor, weight: Tensor, groups: Groups, order: RowOrder) -> Tensor:
        return _LoopProduct.apply(x, weight, groups, main_gradient_of(weight), None, order)
