"""Collectives as autograd functions, each with the collective of its backward pass.

On an axis of one process every function is the identity. Conjugate pairs (the forward of one is the backward of
the other): copy and reduce; gather and reduce-scatter; split and all-gather of replicated results.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mt_core.parallel.context import Axis, waiting
from mt_core.parallel.reductions import all_reduce_, reduce_scatter_into


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis, in a new tensor. Not differentiable."""
    # A copy since the collective works in place and autograd may have saved x.
    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce_(total, axis)
    return total


def all_gather(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """The shards of all ranks concatenated along `dim`. Not differentiable."""
    shards = empty_shards(x, axis)
    # flatten(0, 1) is a view of contiguous memory, so the collective fills `shards`.
    with waiting(axis):
        dist.all_gather_into_tensor(shards.flatten(0, 1), x.contiguous(), group=axis.group)
    return concat_shards(shards, dim)


def reduce_scatter(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """This rank's shard, along `dim`, of the sum over the axis. Not differentiable."""
    shards = split_shards(x, dim, axis.size)
    shard = shards.new_empty(shards.shape[1:])
    reduce_scatter_into(shard, shards.flatten(0, 1), axis)
    return shard


def empty_shards(x: Tensor, axis: Axis) -> Tensor:
    """Uninitialized [ranks, ...]. Collectives take it flattened to [ranks * ..., ...], which shares its memory."""
    # The list forms of the collectives allocate and copy a tensor for each rank; the *_tensor forms use one buffer.
    return x.new_empty((axis.size, *x.shape))


def concat_shards(shards: Tensor, dim: int) -> Tensor:
    """[ranks, ...] -> shards concatenated along `dim` of the remaining dimensions; a view when `dim` is 0."""
    # [..., ranks, size, ...] -> [..., ranks * size, ...]. For dim > 0 flatten copies.
    return shards.movedim(0, dim).flatten(dim, dim + 1)


def split_shards(x: Tensor, dim: int, count: int) -> Tensor:
    """The inverse of concat_shards, contiguous: [..., size, ...] -> [count, ..., size / count, ...]."""
    return x.unflatten(dim, (count, x.shape[dim] // count)).movedim(dim, 0).contiguous()


class _Copy(torch.autograd.Function):
    """Identity; every rank uses x for a different part of the work, so its gradient is the all-reduced sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        # A new tensor object: autograd treats a Function that returns its input itself as a special case.
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0], ctx.axis), None


class _Reduce(torch.autograd.Function):
    """All-reduce of partial results; the gradient of the sum is the gradient of each summand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    """All-gather; each rank uses the result for a different part of the work, so gradients are reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return all_gather(x, dim, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grads[0], ctx.dim, ctx.axis), None, None


class _ReduceScatter(torch.autograd.Function):
    """Reduce-scatter of partial results; gradients of the shards are all-gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return reduce_scatter(x, dim, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grads[0], ctx.dim, ctx.axis), None, None


class _Split(torch.autograd.Function):
    """Each rank keeps its shard of a replicated tensor; gradients of the shards are all-gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        # contiguous() copies, so the full tensor can be freed.
        return x.chunk(axis.size, dim)[axis.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grads[0], ctx.dim, ctx.axis), None, None


class _GatherCopies(torch.autograd.Function):
    """All-gather; every rank repeats the same work on the result, so each keeps its shard of the equal gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return all_gather(x, dim, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].chunk(ctx.axis.size, ctx.dim)[ctx.axis.rank].contiguous(), None, None


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Identity; backward all-reduces. Used at the input of a tensor-parallel region."""
    return _Copy.apply(x, axis) if axis.size > 1 else x


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """All-reduce; backward is the identity. Used at the output of a tensor-parallel region."""
    return _Reduce.apply(x, axis) if axis.size > 1 else x


def gather_from(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """All-gather along `dim`; backward reduce-scatters. `copy_to` for sharded inputs."""
    return _Gather.apply(x, dim, axis) if axis.size > 1 else x


def reduce_scatter_to(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """Reduce-scatter along `dim`; backward all-gathers. `reduce_from` with a sharded result."""
    return _ReduceScatter.apply(x, dim, axis) if axis.size > 1 else x


def split_to(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """This rank's shard of a replicated tensor; backward all-gathers."""
    return _Split.apply(x, dim, axis) if axis.size > 1 else x


def gather_copies(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """All-gather for work that every rank repeats; backward keeps this rank's shard."""
    return _GatherCopies.apply(x, dim, axis) if axis.size > 1 else x
