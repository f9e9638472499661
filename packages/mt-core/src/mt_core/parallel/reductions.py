"""Data parallelism: every rank has the same weights and different samples; gradients are summed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mt_core.parallel.context import Axis

BUCKET_ELEMENTS = 10_000_000
"""Elements per all-reduce: large enough for few messages, small enough for little extra memory."""


def sum_over(values: Sequence[float], axis: Axis, device: torch.device) -> list[float]:
    """Each value summed over the axis, in fp64."""
    if axis.size == 1:
        return list(values)
    # Counts of tokens exceed 2**24, above which fp32 no longer holds every integer.
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total, group=axis.group)
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
        dist.all_reduce(flat, group=axis.group)
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
