"""Metrics of micro-batches that a loss collects as tensors and gives as numbers when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import Tensor

Reduction = Literal["mean", "sum", "max", "min"]
Recorded = list[tuple[str, Tensor, Reduction]]


def reduced(recorded: Iterable[Recorded]) -> list[tuple[str, float, Reduction]]:
    """A number of each micro-batch, over its tokens; none where it has no tokens."""
    return [
        (name, _number(values, reduction), reduction)
        for of_batch in recorded
        for name, values, reduction in of_batch
        if values.numel()
    ]


def _number(values: Tensor, reduction: Reduction) -> float:
    reduce: dict[str, Any] = {"mean": Tensor.mean, "max": Tensor.max, "min": Tensor.min, "sum": Tensor.sum}
    return float(reduce[reduction](values))
