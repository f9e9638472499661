"""What the first rank of an axis does for all of them."""

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
    message: list[Any] = [(value, _sendable(error))]
    dist.broadcast_object_list(message, src=axis.ranks[0], group=axis.group)
    if axis.rank != 0:
        value, error = message[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def _outcome(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return make(), None
    except Exception as error:
        return None, error


def _sendable(error: Exception | None) -> Exception | None:
    """Of other classes than mt's not all can be pickled."""
    if error is None or isinstance(error, MtError):
        return error
    return RuntimeError(f"the first rank failed: {type(error).__name__}: {error}")
