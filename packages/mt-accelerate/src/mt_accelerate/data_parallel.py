"""Collectives that programs call without an argument that says which ranks take part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.parallel import first_rank
from mt_core.parallel.collectives import all_gather, all_reduce
from mt_core.parallel.context import SINGLE, Axis

T = TypeVar("T")
# Programs call these functions without naming a model, as Accelerate's and Megatron's globals allow.
RANKS: ContextVar[Axis | None] = ContextVar("mt_accelerate.ranks", default=None)
"""The data-parallel ranks of the Accelerator that was made last in this thread; None: all ranks."""


def avg_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Scalars -> [len(losses)]: their means over the data-parallel ranks."""
    values, dp = torch.stack([loss.detach().reshape(()) for loss in losses]), data_parallel_ranks()
    return all_reduce(values, dp) / dp.size if dp.size > 1 else values


def gather_across_data_parallel_groups(tensor: Tensor) -> Tensor:
    """[rows, ...] -> [ranks * rows, ...], by data-parallel rank."""
    value, dp = tensor.detach(), data_parallel_ranks()
    rows = value[None] if value.ndim == 0 else value
    return all_gather(rows, 0, dp) if dp.size > 1 else rows


def reduce_across_data_parallel_group(tensor: Tensor, reduction: str = "sum", scale: float = 1.0) -> Tensor:
    """The sum or the mean over the data-parallel ranks, times scale, as a new tensor; none: the tensor times scale.
    Raises ConfigError for another reduction."""
    if reduction not in ("sum", "mean", "none"):
        raise ConfigError(f'reduce(reduction="{reduction}"): it can be sum, mean or none')
    value, dp = tensor.detach().clone(), data_parallel_ranks()
    if dp.size > 1 and reduction != "none":
        value = all_reduce(value, dp)
    # A sum without a scale needs no further pass.
    return value * (scale / dp.size if reduction == "mean" else scale) if (reduction, scale) != ("sum", 1.0) else value


def pad_across_data_parallel_group(tensor: Tensor, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Tensor:
    """Filled up with pad_index along dim to the largest size of all data-parallel ranks."""
    dp = data_parallel_ranks()
    # A dimension that the tensor has not is left alone, as in Accelerate.
    if dp.size == 1 or not -tensor.ndim <= dim < tensor.ndim:
        return tensor
    size = tensor.shape[dim]
    # Sizes are exchanged first: all_gather needs equal shapes.
    missing = int(all_gather(torch.tensor([size], device=tensor.device), 0, dp).max()) - size
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    padding = tensor.new_full(shape, pad_index)
    return torch.cat([padding, tensor] if pad_first else [tensor, padding], dim)


def on_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The function of every tensor in nested mappings, lists, tuples and named tuples."""
    if isinstance(value, Mapping):
        return {name: on_tensors(function, one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        parts = [on_tensors(function, one) for one in value]
        # A named tuple takes its fields one by one.
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return function(value)


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def from_first_rank(value: T) -> T:
    """The first rank's value, on every rank."""
    held = [value]
    if dist.is_initialized():
        # Values of mt and the program's indices and seeds, between ranks of
        # one job: pickled, and never read from a file.
        dist.broadcast_object_list(held, src=0)
    return held[0]


def on_first_rank(function: Callable[[], T]) -> T:
    """What the function gives on the first rank, on every rank; its error too. Collective."""
    # The default group, which the program's launcher made: a context exists only after prepare().
    return first_rank.on_first_rank(function, world_ranks())


def world_ranks() -> Axis:
    """All ranks of the run, on the default group."""
    if not dist.is_initialized():
        return SINGLE
    return Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD, tuple(range(dist.get_world_size())))


def data_parallel_ranks() -> Axis:
    """Those that the collectives here are over."""
    return RANKS.get() or world_ranks()
