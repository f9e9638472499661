"""Functions of every tensor in nested lists, tuples and mappings, and of objects of all ranks."""

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

# -- collectives without an argument for the group ---------------------------------------------------

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


def on_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    """The function of every leaf in nested mappings, lists, tuples and named tuples."""
    return recursively_apply(function, value, test_type=lambda leaf: True)


def gather(tensor: Any) -> Any:
    """[rows, ...] -> those of all data-parallel ranks, of each tensor in nested values."""
    return on_tensors(gather_across_data_parallel_groups, tensor)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """The sum or the mean over all data-parallel ranks, times scale, of each tensor in nested values."""
    return on_tensors(lambda leaf: reduce_across_data_parallel_group(leaf, reduction, scale), tensor)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Each tensor in nested values, filled up along dim to the largest size of all data-parallel ranks."""
    return on_tensors(lambda leaf: pad_across_data_parallel_group(leaf, dim, pad_index, pad_first), tensor)


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def from_first_rank(value: T) -> T:
    """The first rank's value, on every rank."""
    values = [value]
    if dist.is_initialized():
        # Values of mt and the program's indices and seeds, between ranks of
        # one job: pickled, and never read from a file.
        dist.broadcast_object_list(values, src=0)
    return values[0]


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
    """The ranks that the collectives here are over."""
    return RANKS.get() or world_ranks()


def recursively_apply(
    function: Callable[..., Any],
    value: Any,
    *arguments: Any,
    test_type: Callable[[Any], bool] = lambda leaf: isinstance(leaf, Tensor),
    error_on_other_type: bool = False,
    **options: Any,
) -> Any:
    """The function of each leaf that test_type holds of; others stay. Raises TypeError for others on request."""

    def of(item: Any) -> Any:
        return recursively_apply(
            function, item, *arguments, test_type=test_type, error_on_other_type=error_on_other_type, **options
        )

    if isinstance(value, tuple | list):
        return honor_type(value, [of(item) for item in value])
    if isinstance(value, Mapping):
        return _mapping_like(value, {name: of(item) for name, item in value.items()})
    if test_type(value):
        return function(value, *arguments, **options)
    if error_on_other_type:
        raise TypeError(f"got a {type(value).__name__}; nested lists, tuples and mappings may hold tensors only")
    return value


def honor_type(value: Any, parts: Any) -> Any:
    """parts in a container of the type of value; a named tuple takes its fields one by one."""
    return type(value)(*parts) if is_namedtuple(value) else type(value)(parts)


def _mapping_like(value: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    # Types such as BatchEncoding of transformers, whose `to` and attributes programs use. A defaultdict's first
    # argument is no mapping.
    try:
        return type(value)(parts)  # type: ignore[call-arg]
    except TypeError:
        return parts


def is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def is_torch_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def send_to_device(
    value: Any, device: torch.device | str, non_blocking: bool = False, skip_keys: str | list[str] | None = None
) -> Any:
    """Everything nested that has a method `to`. skip_keys: of mappings that stay where they are."""
    skipped = [skip_keys] if isinstance(skip_keys, str) else skip_keys or []
    if isinstance(value, Mapping):
        moved = {
            name: item if name in skipped else send_to_device(item, device, non_blocking, skipped)
            for name, item in value.items()
        }
        return _mapping_like(value, moved)
    if isinstance(value, tuple | list):
        return honor_type(value, [send_to_device(item, device, non_blocking, skipped) for item in value])
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=non_blocking)
    return value.to(device) if hasattr(value, "to") else value


def find_batch_size(value: Any) -> int | None:
    """Length of the first tensor that has one; None without tensors."""
    if isinstance(value, Tensor):
        return len(value) if value.ndim else None
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return next((size for size in map(find_batch_size, inner) if size is not None), None)


def slice_tensors(value: Any, rows: slice) -> Any:
    return recursively_apply(lambda leaf: leaf[rows], value)


def concatenate(values: Any, dim: int = 0) -> Any:
    """Values that are nested alike, concatenated tensor by tensor."""
    first = values[0]
    if isinstance(first, tuple | list):
        return honor_type(first, [concatenate([value[i] for value in values], dim) for i in range(len(first))])
    if isinstance(first, Mapping):
        return _mapping_like(first, {name: concatenate([value[name] for value in values], dim) for name in first})
    return torch.cat(values, dim)


def find_device(value: Any) -> torch.device | None:
    """Device of the first tensor; None without tensors."""
    if isinstance(value, Tensor):
        return value.device
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return next((device for device in map(find_device, inner) if device is not None), None)


def convert_to_fp32(value: Any) -> Any:
    """16-bit tensors in 32 bits; others stay."""
    return recursively_apply(
        lambda leaf: leaf.float(),
        value,
        test_type=lambda leaf: isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16),
    )


def gather_object(value: list[Any]) -> list[Any]:
    """The lists of all data-parallel ranks, one after another. Collective."""
    ranks = data_parallel_ranks()
    if ranks.size == 1:
        return value
    lists: list[Any] = [None] * ranks.size
    dist.all_gather_object(lists, value, group=ranks.group)
    return [item for of_rank in lists for item in of_rank]


def broadcast(value: Any, from_process: int = 0) -> Any:
    """Tensors of the rank from_process, on every rank. Collective; in place."""

    def send(leaf: Tensor) -> Tensor:
        dist.broadcast(leaf, src=from_process)
        return leaf

    return recursively_apply(send, value) if dist.is_initialized() else value


def broadcast_object_list(values: list[Any], from_process: int = 0) -> list[Any]:
    """The objects of the rank from_process, on every rank. Collective; in place."""
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=from_process)
    return values
