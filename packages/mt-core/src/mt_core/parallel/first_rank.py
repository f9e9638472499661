"""What the first rank of an axis does for all of them, and errors that any rank raises for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from mt_core.errors import MtError
from mt_core.parallel.context import Axis

T = TypeVar("T")


def on_first_rank(make: Callable[[], T], axis: Axis) -> T:
    """What `make` returns on the first rank, on every rank of the axis, as a copy that was pickled. Collective.

    An error of `make` is raised on every rank: the others would wait in the broadcast until the launcher ends them.
    """
    if axis.size == 1:
        return make()
    value, error = _outcome(make) if axis.rank == 0 else (None, None)
    message: list[Any] = [(value, _sendable(error, axis))]
    dist.broadcast_object_list(message, src=axis.ranks[0], group=axis.group)
    if axis.rank != 0:
        value, error = message[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def all_gather_objects(value: T, axis: Axis) -> list[T]:
    """The values of all ranks of the axis, by rank, as copies that were pickled. Collective."""
    if axis.size == 1:
        return [value]
    of_ranks: list[Any] = [None] * axis.size
    dist.all_gather_object(of_ranks, value, group=axis.group)
    return of_ranks


def raise_on_all_ranks(error: Exception | None, axis: Axis) -> None:
    """Raise the error of the first rank of the axis that has one. Collective."""
    of_ranks = [error]
    if axis.size > 1:
        of_ranks = [None] * axis.size
        dist.all_gather_object(of_ranks, _sendable(error, axis), group=axis.group)
        # As it was raised here, with its cause.
        of_ranks[axis.rank] = error
    for of_rank in of_ranks:
        if of_rank is not None:
            raise of_rank


def _outcome(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return make(), None
    except Exception as error:
        return None, error


def _sendable(error: Exception | None, axis: Axis) -> Exception | None:
    """An error of this rank. Of other classes than mt's not all can be pickled."""
    if error is None or isinstance(error, MtError):
        return error
    return RuntimeError(f"rank {axis.ranks[axis.rank]} failed: {type(error).__name__}: {error}")
