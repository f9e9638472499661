"""Rows in the order of experts, and the interface of the grouped GEMM: one matrix for each expert."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from mt_moe.permutation import RowOrder


class Groups:
    """counts: [E] int64, the rows of each expert. The rows of one expert are consecutive; further rows belong to none,
    and what products give for them is undefined."""

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """First row and end of each expert. Synchronizes with the device."""
        ends = self.counts.cumsum(0).tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))

    @cached_property
    def even(self) -> int | None:
        """Rows of each expert if all have the same number, as with padding to capacity; else None. Synchronizes."""
        sizes = {end - first for first, end in self.bounds}
        return sizes.pop() if len(sizes) == 1 else None

    @cached_property
    def ends(self) -> Tensor:
        """[E] int32, the end of each expert's rows, on the device."""
        return self.counts.cumsum(0).to(torch.int32)

    def numbers(self, rows: int) -> Tensor:
        """[rows] int64, the expert of each row; the last one for rows that belong to none."""
        positions = torch.arange(rows, device=self.counts.device)
        # right=True: position ends[e] belongs to expert e + 1, and empty experts are passed over.
        return torch.searchsorted(self.counts.cumsum(0), positions, right=True).clamp(max=len(self.counts) - 1)

    def present(self, rows: int) -> Tensor:
        """[rows] bool, whether each row belongs to an expert."""
        return torch.arange(rows, device=self.counts.device) < self.counts.sum()


GroupedProduct = Callable[[Tensor, Tensor, Groups], Tensor]
"""(x [R, in], weight [E, out, in], groups) -> [R, out], the rows of expert e times weight[e]^T. Differentiable."""


@runtime_checkable
class PermutingProduct(Protocol):
    """A GroupedProduct that permutes rows while it loads and stores them, so that no permuted copy exists."""

    def __call__(self, x: Tensor, weight: Tensor, groups: Groups) -> Tensor: ...

    def of_tokens(self, x: Tensor, weight: Tensor, groups: Groups, order: RowOrder) -> Tensor:
        """x [n, in] -> [R, out]: the product of order.permute(x)"""
        ...

    def to_tokens(self, x: Tensor, weight: Tensor, groups: Groups, order: RowOrder) -> Tensor:
        """x [R, in] -> [n, out]: order.unpermute of the product"""
        ...
