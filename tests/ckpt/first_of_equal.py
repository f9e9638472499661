"""The highest values of a tensor, of equal ones the first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def first_of_equal() -> Iterator[None]:
    """Replaces `Tensor.topk`, whose choice among equal values depends on how many there are.

    Two programs that choose from the same scores then choose the same, however many masked ones stand behind them.
    """
    chosen = torch.Tensor.topk

    def topk(scores: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
        order = scores.argsort(dim=dim, descending=largest, stable=True).narrow(dim, 0, k)
        return torch.return_types.topk((scores.gather(dim, order), order))

    torch.Tensor.topk = topk  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.topk = chosen  # type: ignore[method-assign]
