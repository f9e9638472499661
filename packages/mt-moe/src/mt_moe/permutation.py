"""The router's output, and the permutation of tokens into the order of their experts and back.

Shapes: n rows, each copied m times, R = n m rows.
`permute` copies each row to its m positions, `unpermute` sums the m positions of each row: each is the backward pass
of the other. Both use two primitives on rows, so that a kernel has to replace only these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# -- the router's output -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Routing:
    """The experts of T tokens, k each.

    experts: [T, k] int64, global expert numbers, distinct for each token. weights: [T, k], factors of the experts'
    outputs; differentiable. kept: [T, k] bool, False where the token was dropped by capacity; None: nothing dropped.
    padded_to: rows that every expert gets from this rank, padded with zeros; None: no padding. training: of a
    micro-batch that is trained on. counts: [E] int64, choices of each expert, dropped ones too; None: not counted.
    identity: [T], what a token itself counts, the weights of its experts that return it; None: there are none. Among
    experts these are numbers from E on, and dropped.
    shared: [T, n], factors of the outputs of n shared experts; None: the router does not score these.
    """

    experts: Tensor
    weights: Tensor
    num_experts: int
    kept: Tensor | None = None
    padded_to: int | None = None
    training: bool = False
    counts: Tensor | None = None
    identity: Tensor | None = None
    shared: Tensor | None = None

    @property
    def topk(self) -> int:
        return self.experts.shape[1]


GatherRows = Callable[[Tensor, Tensor, bool], Tensor]
"""(x [n, H], rows [R], complete) -> x[rows]; zeros where rows is -1. complete: no row is -1."""
SumRows = Callable[[Tensor, Tensor, bool], Tensor]
"""(y [R, H], places [n, m], complete) -> for each of n the sum of y at its positions, in order; -1 adds nothing"""


def gather_rows(x: Tensor, rows: Tensor, complete: bool) -> Tensor:
    return x.index_select(0, rows) if complete else _with_zero_row(x)[rows]


def sum_rows(y: Tensor, places: Tensor, complete: bool) -> Tensor:
    if not complete:
        y = _with_zero_row(y)
        # -1 becomes the last row, which is zero: embedding_bag takes no negative index.
        places = places % len(y)
    # A sum of one row.
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

    @cached_property
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
    # [n, m] -> [n * m, 1]: each copy has a value of its own, so the permutation is one of single copies. With the
    # default kernels, as a row has one element.
    return permute(x.reshape(-1, 1), Permutation(permutation.order, permutation.inverse, permutation.complete)).view(-1)


def sort_by(keys: Tensor, kernels: RowKernels) -> Permutation:
    """Stable argsort of the keys [n * m]."""
    # 2 tokens with experts (1 0) and (0 1): keys 1 0 0 1, order 1 2 0 3, inverse 2 0 1 3. Rows are then token 0, 1, 0,
    # 1.
    _, order = _stable_sort(keys)
    return Permutation(order, _inverse_of(order, _positions(order)), kernels=kernels)


def sort_present(keys: Tensor, size: int, kernels: RowKernels) -> tuple[Permutation, Tensor]:
    """Stable argsort of the keys [n * m] below `size`, and how many there are of each [size]. Copies with the key
    `size` are dropped: as many positions at the end are empty, so that the host needs no number of the others."""
    # The last class holds the dropped ones, which sort behind all others.
    counts = count_occurrences(keys, size + 1)[:-1]
    _, order = _stable_sort(keys)
    positions = _positions(order)
    # On the device. Cutting the tensors to the number of rows would need it on the host.
    there = positions < counts.sum()
    inverse = _inverse_of(order, torch.where(there, positions, -1))
    return Permutation(torch.where(there, order, -1), inverse, complete=False, kernels=kernels), counts


def first_positions(permutation: Permutation, rows: int) -> Permutation:
    """Without the positions from `rows` on; copies that are there are dropped."""
    if rows >= len(permutation.order):
        return permutation
    inverse = permutation.inverse
    return replace(
        permutation,
        order=permutation.order[:rows],
        inverse=torch.where(inverse < rows, inverse, -1),
        complete=False,
    )


def _stable_sort(keys: Tensor) -> tuple[Tensor, Tensor]:
    """(the keys in order, int16; their positions before, int64). keys: int64 in [0, 2^15)."""
    # A GPU sorts by one byte of the keys after the other: 2 passes in place of 8.
    in_order, order = keys.to(torch.int16).sort(stable=True)
    return in_order, order


def _inverse_of(order: Tensor, positions: Tensor) -> Tensor:
    # inverse[order[p]] = p
    return torch.empty_like(order).scatter_(0, order, positions)


def _positions(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device)


def count_occurrences(numbers: Tensor, size: int) -> Tensor:
    """[...] int64 in [0, size) -> [size] int64. torch.bincount waits for the device, to find the largest number."""
    flat = numbers.flatten()
    return flat.new_zeros(size).scatter_add_(0, flat, torch.ones_like(flat))


def sort_by_expert(routing: Routing, kernels: RowKernels) -> tuple[Permutation, Tensor]:
    """The kept choices sorted by expert, then by token; and the number of rows of each expert [E].

    With padding every expert has `routing.padded_to` positions, the last of which may be empty. Dropping without
    padding leaves as many positions empty at the end as choices were dropped.
    """
    if routing.kept is None and routing.padded_to is None:
        # [T * k]; the router has counted for its own purposes in training.
        keys, counts = routing.experts.flatten(), routing.counts
        if counts is None:
            counts = count_occurrences(keys, routing.num_experts)
        return sort_by(keys, kernels), counts
    keys = _keys(routing)
    if routing.padded_to is None:
        return sort_present(keys, routing.num_experts, kernels)
    counts = count_occurrences(keys, routing.num_experts + 1)[:-1]
    # Every expert has a block of padded_to positions.
    permutation = _in_blocks(*_stable_sort(keys), counts, routing.padded_to, kernels)
    return permutation, torch.full_like(counts, routing.padded_to)


def sort_by_rank(routing: Routing, ranks: int, room: int, kernels: RowKernels) -> tuple[Permutation, Tensor]:
    """The kept choices sorted by expert in blocks of `room` positions, one for each of the ranks that hold equally many
    experts; and the rows of each expert [E], which may be more than fit: these are dropped from the permutation."""
    local = routing.num_experts // ranks
    sorted_keys, order = _stable_sort(_keys(routing))
    sorted_keys = sorted_keys.to(torch.int64)
    counts = count_occurrences(sorted_keys, routing.num_experts + 1)[:-1]
    # Consecutive experts are on one rank, so sorting by expert sorts by rank too; the key of dropped choices becomes
    # `ranks`.
    return _in_blocks(sorted_keys // local, order, counts.view(ranks, local).sum(1), room, kernels), counts


def _keys(routing: Routing) -> Tensor:
    """[n * m] the expert of each choice; the number of experts for a dropped one."""
    if routing.kept is None:
        return routing.experts.flatten()
    return torch.where(routing.kept, routing.experts, routing.num_experts).flatten()


def _in_blocks(sorted_keys: Tensor, order: Tensor, counts: Tensor, size: int, kernels: RowKernels) -> Permutation:
    """The copies of each key at the start of its block of `size` positions. Dropped are those that do not fit, and
    those with the key len(counts)."""
    blocks, sorted_keys = len(counts), sorted_keys.to(torch.int64)
    # [blocks + 1]: where the copies of each key begin in sorted order.
    first = F.pad(counts.cumsum(0) - counts, (0, 1), value=-size)  # no dropped one is among the first `size`
    # Position of each copy inside its block. Example with size 2 and sorted keys 0 0 0 1: places 0 1 2 0, of which the
    # third does not fit; positions are 0 1 | 3 -1.
    places = _positions(order) - first[sorted_keys]
    places = torch.where(places < size, places + sorted_keys * size, blocks * size)  # the last position is cut off
    positions = order.new_full((blocks * size + 1,), -1).scatter_(0, places, order)[:-1]
    inverse = _inverse_of(order, torch.where(places < blocks * size, places, -1))
    return Permutation(positions, inverse, complete=False, kernels=kernels)
