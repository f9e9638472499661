"""Permutes tokens into the order of their experts, and back. Shapes: n rows, each copied m times, R = n m rows.

`permute` copies each row to its m positions, `unpermute` sums the m positions of each row: each is the backward pass
of the other. Both use two primitives on rows, so that a kernel has to replace only these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_moe.routing.result import Routing

GatherRows = Callable[[Tensor, Tensor, bool], Tensor]
"""(x [n, H], rows [R], complete) -> x[rows]; zeros where rows is -1. complete: no row is -1."""
SumRows = Callable[[Tensor, Tensor, bool], Tensor]
"""(y [R, H], places [n, m], complete) -> for each of n the sum of y at its positions, in order; -1 adds nothing"""


def gather_rows(x: Tensor, rows: Tensor, complete: bool) -> Tensor:
    return x.index_select(0, rows) if complete else _with_zero_row(x)[rows]


def sum_rows(y: Tensor, places: Tensor, complete: bool) -> Tensor:
    if not complete:
        y = _with_zero_row(y)
        places = places % len(y)
    if places.shape[1] == 1:
        return y.index_select(0, places[:, 0])
    # One pass: accumulated in fp32 or wider, rounded once (a CPU rounds bf16 ties away from zero); no [n, m, H] tensor.
    return F.embedding_bag(places, y, mode="sum")


def _with_zero_row(x: Tensor) -> Tensor:
    """Appends a row, which the index -1 selects."""
    return torch.cat([x, x.new_zeros(1, x.shape[1])])


@dataclass(frozen=True)
class RowKernels:
    """The implementations of the two primitives."""

    gather: GatherRows = gather_rows
    sum: SumRows = sum_rows


@dataclass(frozen=True)
class Permutation:
    """order: [R] int64, for each position the index (row * m + copy) that it holds; -1: an empty position.
    inverse: [n * m] int64, the position of each (row, copy); -1: dropped. complete: there is no -1."""

    order: Tensor
    inverse: Tensor
    complete: bool = True
    kernels: RowKernels = field(default_factory=RowKernels)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, permutation: Permutation, copies: int) -> Tensor:
        ctx.permutation, ctx.copies = permutation, copies
        return _to_places(x, permutation, copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _from_places(grads[0], ctx.permutation, ctx.copies), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, permutation: Permutation, copies: int) -> Tensor:
        ctx.permutation, ctx.copies = permutation, copies
        return _from_places(y, permutation, copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _to_places(grads[0], ctx.permutation, ctx.copies), None, None


def _to_places(x: Tensor, permutation: Permutation, copies: int) -> Tensor:
    return permutation.kernels.gather(x, _tokens_of(permutation, copies), permutation.complete)


def _tokens_of(permutation: Permutation, copies: int) -> Tensor:
    return permutation.order if copies == 1 else permutation.order // copies  # -1 stays -1


def _from_places(y: Tensor, permutation: Permutation, copies: int) -> Tensor:
    return permutation.kernels.sum(y, permutation.inverse.view(-1, copies), permutation.complete)


def permute(x: Tensor, permutation: Permutation, copies: int = 1) -> Tensor:
    """[n, H] -> [R, H], each row `copies` times."""
    return _Permute.apply(x, permutation, copies)


def unpermute(y: Tensor, permutation: Permutation, copies: int = 1) -> Tensor:
    """[R, H] -> [n, H], the sum of the copies of each row."""
    return _Unpermute.apply(y, permutation, copies)


@dataclass(frozen=True)
class RowOrder:
    """Tokens [n, H] <-> rows [R, H] in the order of experts, of which each token has `copies`."""

    permutation: Permutation
    copies: int = 1

    @property
    def tokens(self) -> Tensor:
        """[R] int64, the token of each row; -1: an empty row."""
        return _tokens_of(self.permutation, self.copies)

    def permute(self, x: Tensor) -> Tensor:
        return permute(x, self.permutation, self.copies)

    def unpermute(self, y: Tensor) -> Tensor:
        """For each token the sum of its rows."""
        return unpermute(y, self.permutation, self.copies)


def permute_numbers(x: Tensor, permutation: Permutation) -> Tensor:
    """One value for each copy [n, m] -> [R]."""
    return permute(x.reshape(-1, 1), Permutation(permutation.order, permutation.inverse, permutation.complete)).view(-1)


def sort_by(keys: Tensor, kernels: RowKernels) -> Permutation:
    """Stable argsort of the keys [n * m]."""
    order = keys.argsort(stable=True)
    return Permutation(order, inverse_of(order, len(keys)), kernels=kernels)


def inverse_of(order: Tensor, wishes: int) -> Tensor:
    places = torch.arange(len(order), device=order.device)
    return order.new_full((wishes,), -1).scatter_(0, order, places)


def count_occurrences(numbers: Tensor, size: int) -> Tensor:
    """[...] int64 in [0, size) -> [size] int64. torch.bincount waits for the device, to find the largest number."""
    flat = numbers.flatten()
    return flat.new_zeros(size).scatter_add_(0, flat, torch.ones_like(flat))


def sort_by_expert(routing: Routing, kernels: RowKernels) -> tuple[Permutation, Tensor]:
    """The kept choices sorted by expert, then by token; and the number of rows of each expert [E].

    With padding every expert has `routing.padded_to` positions, the last of which may be empty. Dropping without
    padding waits for the device, since the number of rows depends on the choices.
    """
    if routing.kept is None and routing.padded_to is None:
        keys = routing.experts.flatten()
        return sort_by(keys, kernels), count_occurrences(keys, routing.num_experts)
    kept = torch.ones_like(routing.experts, dtype=torch.bool) if routing.kept is None else routing.kept
    keys = torch.where(kept, routing.experts, routing.num_experts).flatten()  # the dropped ones at the end
    counts = count_occurrences(keys, routing.num_experts + 1)[:-1]
    if routing.padded_to is not None:
        permutation = _padded(keys, counts, routing.padded_to, kernels)
        return permutation, torch.full_like(counts, routing.padded_to)
    order = keys.argsort(stable=True)[: int(counts.sum())]
    return Permutation(order, inverse_of(order, len(keys)), complete=False, kernels=kernels), counts


def _padded(keys: Tensor, counts: Tensor, size: int, kernels: RowKernels) -> Permutation:
    """Each expert's rows at the start of its `size` positions; keys [R], the number of experts for a dropped one."""
    dropped = len(counts)
    sorted_keys, order = keys.sort(stable=True)
    ends = counts.cumsum(0)
    first = torch.cat([ends - counts, ends[-1:]])
    places = torch.arange(len(keys), device=keys.device) - first[sorted_keys] + sorted_keys * size
    places = torch.where(sorted_keys < dropped, places, dropped * size)  # the last position is cut off
    positions = keys.new_full((dropped * size + 1,), -1).scatter_(0, places, order)[:-1]
    inverse = torch.empty_like(keys).scatter_(0, order, torch.where(sorted_keys < dropped, places, -1))
    return Permutation(positions, inverse, complete=False, kernels=kernels)
