"""How the tensors of two checkpoints differ, whatever formats they are in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mt_core.checkpoint_specs import CheckpointReader

BLOCK = 1 << 22


@dataclass(frozen=True)
class Difference:
    """One tensor that is not the same. what: in words. largest: of the absolute differences, None if there are none
    to take; count: of elements that differ."""

    name: str
    what: str
    largest: float | None = None
    count: int = 0


def differences(
    first: CheckpointReader,
    second: CheckpointReader,
    names: list[str],
    progress: Callable[[str], None] = lambda name: None,
) -> Iterator[Difference]:
    """What differs among the tensors `names`, each of which one of the two has. NaN equals NaN."""
    ours, theirs = first.shapes(), second.shapes()
    for name in names:
        if name not in theirs:
            yield Difference(name, "only in the first")
        elif name not in ours:
            yield Difference(name, "only in the second")
        elif tuple(ours[name]) != tuple(theirs[name]):
            yield Difference(name, f"shape {list(ours[name])} and {list(theirs[name])}")
        else:
            yield from _of_values(name, first.read(name), second.read(name))
        progress(name)


def _of_values(name: str, first: Tensor, second: Tensor) -> Iterator[Difference]:
    dtypes = "" if first.dtype == second.dtype else f"{first.dtype} and {second.dtype}".replace("torch.", "")
    largest, count = 0.0, 0
    # In blocks of 4 Mi elements: three fp64 copies of a whole embedding would be many times its size.
    for a, b in zip(first.reshape(-1).split(BLOCK), second.reshape(-1).split(BLOCK), strict=True):
        floats = a.is_floating_point() or b.is_floating_point()
        same, gap = _of_floats(a, b) if floats else _of_integers(a, b)
        count += int((~same).sum())
        largest = max(largest, gap.max().item() if gap.numel() else 0.0)
    if count or dtypes:
        yield Difference(name, dtypes or "values", largest if count else None, count)


def _of_floats(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Which elements are the same, and the absolute differences in fp64."""
    # fp64 holds every value of the smaller float types exactly, so that bf16 can be compared with fp32.
    a, b = first.to(torch.float64), second.to(torch.float64)
    same = (a == b) | (a.isnan() & b.isnan())
    # `same` first: inf - inf is NaN where both are infinite. A NaN on one side only counts as an infinite difference.
    return same, (a - b).abs().masked_fill(same, 0.0).nan_to_num(nan=float("inf"))


def _of_integers(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The same for integers: fp64 rounds those beyond 2**53, so that different ones would be the same."""
    a, b = first.to(torch.int64), second.to(torch.int64)
    gap = (a.to(torch.float64) - b.to(torch.float64)).abs()
    # Where int64 does not overflow, its own difference is exact.
    return a == b, torch.where(gap < 2.0**62, (a - b).abs().to(torch.float64), gap)
