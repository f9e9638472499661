"""Sums over the segments of packed rows, differentiable, also where context-parallel ranks share a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mt_core.parallel.context import Axis
from mt_core.parallel.reductions import all_reduce_


def segment_sums(values: Tensor, batch: Mapping[str, Tensor], cp: Axis) -> Tensor:
    """values [B, S] -> [B, N] sums over each segment of a row, on all context-parallel ranks; N even, at least the
    number of segments. Positions of padding are a segment, too."""
    rows, length = values.shape
    # As many columns as there are positions on all ranks: a number that follows from shapes alone, so that nothing
    # waits.
    columns = length * cp.size + length * cp.size % 2 + 2
    sums = values.new_zeros((rows, columns)).scatter_add(1, batch["segment_ids"].long(), values)
    return _SumOverRanks.apply(sums, cp) if cp.size > 1 else sums


class _SumOverRanks(torch.autograd.Function):
    """Sum over an axis whose ranks go on with losses of their own: the gradient is the sum of theirs, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        total = x.clone(memory_format=torch.contiguous_format)
        all_reduce_(total, axis)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        all_reduce_(total, ctx.axis)
        return total, None
