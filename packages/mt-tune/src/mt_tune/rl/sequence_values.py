"""Sums and means over the completion of each row, also where context-parallel ranks have parts of it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mt_core.parallel.collectives import copy_to, reduce_from
from mt_core.parallel.context import Axis

SequenceValue = Callable[[Tensor], Tensor]
"""[B, S] -> [B, S]: at each position the same value of its row."""


def sequence_sum(counted: Tensor, cp: Axis) -> SequenceValue:
    """counted [B, S]: 1 for the positions that the sum is over."""

    def total(values: Tensor) -> Tensor:
        return _over_ranks((values * counted).sum(1, keepdim=True), cp).expand_as(values)

    return total


def sequence_mean(counted: Tensor, cp: Axis) -> SequenceValue:
    """The sum over the number of counted positions; 0 of none."""
    total = sequence_sum(counted, cp)
    counts = total(counted).clamp(min=1.0)
    return lambda values: total(values) / counts


def _over_ranks(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis, whose ranks go on with losses of their own: gradients are summed over it, too."""
    return copy_to(reduce_from(x, axis), axis) if axis.size > 1 else x
