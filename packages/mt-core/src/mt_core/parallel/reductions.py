"""Sums, maxima, minima and means over the ranks of an axis.

Every reducing collective of mt goes through `all_reduce_`, `reduce_scatter_into` and their asynchronous forms: nothing
outside of `mt_core.parallel` calls one of torch.distributed (tests/core/test_reducing_collectives.py). So the order in
which the ranks' values are added is decided here and nowhere else. Two reductions are inside of other libraries: those
of FSDP2 (`mt_core.optim.fully_sharded_weights`) and those of torch's DistributedDataParallel in mt_accelerate.

All functions are collective over the axis and the identity on an axis of one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mt_core import _torch_compat
from mt_core.parallel.context import Axis, waiting

BUCKET_ELEMENTS = 10_000_000
"""Elements per all-reduce: large enough for few messages, small enough for little extra memory."""

Operation = Literal["sum", "max", "min"]
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


# -- primitives ----------------------------------------------------------------------------------------


def all_reduce_(x: Tensor, axis: Axis, operation: Operation = "sum") -> None:
    """Reduce x over the axis, in place. x is contiguous."""
    if axis.size > 1:
        with waiting(axis):
            dist.all_reduce(x, op=_OPERATIONS[operation], group=axis.group)


def start_all_reduce_(x: Tensor, axis: Axis, operation: Operation = "sum") -> dist.Work | None:
    """Start `all_reduce_`. x is the result once the returned handle was waited for; None: nothing was started."""
    if axis.size == 1:
        return None
    return dist.all_reduce(x, op=_OPERATIONS[operation], group=axis.group, async_op=True)


def reduce_scatter_into(shard: Tensor, whole: Tensor, axis: Axis) -> None:
    """Sum whole [ranks * n, ...] over the axis; shard [n, ...] becomes this rank's rows of the sum.

    shard may be those rows of whole itself; the other rows of whole then have no meaning afterwards.
    """
    if axis.size > 1:
        with waiting(axis):
            dist.reduce_scatter_tensor(shard, whole, group=axis.group)
    else:
        shard.copy_(whole)


def start_reduce_scatter_into(shard: Tensor, whole: Tensor, axis: Axis) -> dist.Work | None:
    """Start `reduce_scatter_into`. shard is the result once the returned handle was waited for; None: it already is."""
    if axis.size == 1:
        shard.copy_(whole)
        return None
    return dist.reduce_scatter_tensor(shard, whole, group=axis.group, async_op=True)


def matmul_reduce_scatter(x: Tensor, matrix: Tensor, dim: int, axis: Axis) -> Tensor:
    """x [..., in], matrix [in, out] -> this rank's shard, along `dim`, of the sum of x @ matrix over the axis.

    Computed in parts while the parts of other ranks are copied (`_torch_compat.matmul_reduce_scatter`).
    """
    assert axis.group is not None
    return _torch_compat.matmul_reduce_scatter(x, matrix, dim, axis.group)


def sum_in_rank_order_(tensors: Sequence[Tensor], group: Any) -> Any:
    """Sum each tensor over the ranks of a group, in place, adding the ranks' values in the order of the ranks; a ring
    adds each part of a tensor in another order.

    group: a boxed ProcessGroup, as operators of the dispatcher take it. Returns their boxed Work, which has ended.
    """
    ranks = dist.ProcessGroup.unbox(group).size()
    values = [[torch.empty_like(tensor) for _ in range(ranks)] for tensor in tensors]
    _, work = torch.ops.c10d.allgather_(values, list(tensors), group, -1)
    dist.Work.unbox(work).wait()
    for tensor, of_ranks in zip(tensors, values, strict=True):
        total = of_ranks[0]
        for value in of_ranks[1:]:
            total = total + value
        tensor.copy_(total)
    return work


# -- what is reduced -----------------------------------------------------------------------------------


def mean_(x: Tensor, axis: Axis) -> None:
    """The mean over the axis, in place."""
    all_reduce_(x, axis)
    x /= axis.size


def sum_over(values: Sequence[float], axis: Axis, device: torch.device) -> list[float]:
    """Each value summed over the axis, in fp64."""
    if axis.size == 1:
        return list(values)
    # Counts of tokens exceed 2**24, above which fp32 no longer holds every integer.
    total = torch.tensor(values, dtype=torch.float64, device=device)
    all_reduce_(total, axis)
    return total.tolist()


def any_over(flag: bool, axis: Axis, device: torch.device) -> bool:
    """Whether the flag is set on any rank of the axis; all ranks get the same answer."""
    return sum_over([float(flag)], axis, device)[0] > 0


def sum_gradients(gradients: Sequence[Tensor], axis: Axis, bucket_elements: int = BUCKET_ELEMENTS) -> None:
    """Sum gradients over the axis, in place. Every rank passes the same shapes in the same order."""
    if axis.size == 1:
        return
    for bucket in buckets(gradients, bucket_elements):
        # One message a bucket instead of one a tensor: small all-reduces are bound by latency.
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        all_reduce_(flat, axis)
        for gradient, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(summed.view_as(gradient))


def buckets(tensors: Sequence[Tensor], elements: int) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype, together at most `elements` unless one alone is larger."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.numel() > elements or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket
