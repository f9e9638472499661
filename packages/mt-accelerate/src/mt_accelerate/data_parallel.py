"""Functions that Accelerate's train steps call without an argument that says which ranks share the data."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

from mt_core.parallel.collectives import all_gather, all_reduce
from mt_core.parallel.context import ParallelContext

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


def _context() -> ParallelContext:
    return CONTEXT.get() or ParallelContext()
