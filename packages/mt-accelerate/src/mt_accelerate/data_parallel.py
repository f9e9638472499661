"""Collectives that programs call without an argument that says which ranks take part."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mt_core.parallel.collectives import all_gather, all_reduce
from mt_core.parallel.context import ParallelContext

T = TypeVar("T")
CONTEXT: ContextVar[ParallelContext | None] = ContextVar("mt_accelerate.context", default=None)
"""Of the model that `prepare` made last in this thread."""


def avg_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Scalars -> [len(losses)]: their means over the data-parallel ranks."""
    values, dp = torch.stack([loss.detach().reshape(()) for loss in losses]), _context().dp
    return all_reduce(values, dp) / dp.size if dp.size > 1 else values


def gather_across_data_parallel_groups(tensor: Tensor) -> Tensor:
    """[rows, ...] -> [ranks * rows, ...], by data-parallel rank."""
    value, dp = tensor.detach(), _context().dp
    rows = value[None] if value.ndim == 0 else value
    return all_gather(rows, 0, dp) if dp.size > 1 else rows


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def from_first_rank(value: T) -> T:
    """The first rank's value, on every rank."""
    held = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(held, src=0)
    return held[0]


def _context() -> ParallelContext:
    return CONTEXT.get() or ParallelContext()
