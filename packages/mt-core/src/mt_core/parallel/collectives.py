"""Communication as autograd functions: each says what it does forward, and what that means backward.

Axes of one process make every function the identity. Conjugate pairs (forward of one is backward of the
other): copy and reduce; gather and reduce-scatter; split and all-gather of equal copies.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mt_core.parallel.context import Axis


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis, in a new tensor. Not differentiable."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.group)
    return total


def all_gather(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """Pieces of all ranks laid end to end along `dim`. Not differentiable."""
    pieces = new_pieces(x, axis)
    dist.all_gather_into_tensor(pieces.flatten(0, 1), x.contiguous(), group=axis.group)
    return merge_pieces(pieces, dim)


def reduce_scatter(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """This rank's piece, along `dim`, of the sum over the axis. Not differentiable."""
    pieces = split_pieces(x, dim, axis.size)
    own = pieces.new_empty(pieces.shape[1:])
    dist.reduce_scatter_tensor(own, pieces.flatten(0, 1), group=axis.group)
    return own


def new_pieces(x: Tensor, axis: Axis) -> Tensor:
    """Uninitialized [ranks, ...]. Collectives take it flattened to [ranks * ..., ...], which shares its memory."""
    return x.new_empty((axis.size, *x.shape))


def merge_pieces(pieces: Tensor, dim: int) -> Tensor:
    """[ranks, ...] -> pieces end to end along `dim` of the rest; a view when `dim` is 0."""
    return pieces.movedim(0, dim).flatten(dim, dim + 1)


def split_pieces(x: Tensor, dim: int, count: int) -> Tensor:
    """The inverse of merge_pieces, contiguous: [..., size, ...] -> [count, ..., size / count, ...]."""
    return x.unflatten(dim, (count, x.shape[dim] // count)).movedim(dim, 0).contiguous()


class _Copy(torch.autograd.Function):
    """x goes to every rank's share of the work; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0], ctx.axis), None


class _Reduce(torch.autograd.Function):
    """Partial results are summed; the gradient of the sum is that of each part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    """Pieces become the whole, which every rank uses for a part of the work: gradients are reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return all_gather(x, dim, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grads[0], ctx.dim, ctx.axis), None, None


class _ReduceScatter(torch.autograd.Function):
    """Partial results are summed, and each rank keeps a piece; gradients of pieces are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return reduce_scatter(x, dim, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grads[0], ctx.dim, ctx.axis), None, None


class _Split(torch.autograd.Function):
    """Each rank keeps its piece of a tensor that all ranks have; gradients of pieces are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return x.chunk(axis.size, dim)[axis.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grads[0], ctx.dim, ctx.axis), None, None


class _GatherCopies(torch.autograd.Function):
    """Pieces become the whole, which every rank then uses alike: each keeps its piece of the one gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return all_gather(x, dim, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].chunk(ctx.axis.size, ctx.dim)[ctx.axis.rank].contiguous(), None, None


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Identity; backward sums gradients over the axis. Put before work that ranks divide among them."""
    return _Copy.apply(x, axis) if axis.size > 1 else x


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis; backward is the identity. Put behind work that ranks divided among them."""
    return _Reduce.apply(x, axis) if axis.size > 1 else x


def gather_from(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """All-gather along `dim`; backward reduce-scatters. `copy_to` for pieces."""
    return _Gather.apply(x, dim, axis) if axis.size > 1 else x


def reduce_scatter_to(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """Reduce-scatter along `dim`; backward all-gathers. `reduce_from` that keeps a piece."""
    return _ReduceScatter.apply(x, dim, axis) if axis.size > 1 else x


def split_to(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """This rank's piece of what all have; backward all-gathers."""
    return _Split.apply(x, dim, axis) if axis.size > 1 else x


def gather_copies(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """All-gather for work that every rank repeats alike; backward keeps this rank's piece."""
    return _GatherCopies.apply(x, dim, axis) if axis.size > 1 else x
