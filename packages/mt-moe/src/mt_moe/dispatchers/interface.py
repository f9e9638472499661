"""The interface of token dispatchers. Third-party dispatchers import this.

    dispatched = dispatcher.dispatch(tokens, routing)     # tokens [T, H] of this rank
    output = experts(dispatched.tokens, ...)              # as dispatched.tokens, weights applied
    y = dispatcher.combine(output, dispatched.state)      # [T, H]: for each token the sum over its experts

Both are collective over the ranks that hold the experts, and differentiable: backward sends the gradients of tokens
and weights along the inverse path. combine also sums over ranks that share an expert's matrices (etp).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mt_core.parallel.context import Axis, ParallelContext
from mt_moe.permutation import Routing, RowKernels, RowOrder


@dataclass(frozen=True)
class ExpertPlacement:
    """Placement of experts: rank p of the axis `ep` holds experts p * E / ep to (p + 1) * E / ep - 1, and the ranks of
    the axis `etp` shard the matrices of each. kernels: the implementation of permute and unpermute."""

    num_experts: int
    ep: Axis = field(default_factory=Axis)
    etp: Axis = field(default_factory=Axis)
    kernels: RowKernels = field(default_factory=RowKernels)

    @property
    def num_local(self) -> int:
        return self.num_experts // self.ep.size

    @property
    def first_local(self) -> int:
        return self.ep.rank * self.num_local


def expert_placement(num_experts: int, ctx: ParallelContext, kernels: RowKernels) -> ExpertPlacement:
    return ExpertPlacement(num_experts, ctx.ep, ctx.axis("etp"), kernels)


@dataclass(frozen=True)
class Dispatched:
    """Rows for this rank's experts.

    tokens: [R, H] in the order of experts; with `order` [n, H], which the experts bring into that order and back, so
    that a product can do both. weights: [R] in the order of experts. counts: [experts of this rank] int64, rows of
    each; the rows after those are empty, and products leave theirs undefined. state: opaque, passed to combine.
    overflow: [] bool, whether some rank had room for fewer rows than there are; the weights are then NaN. None: there
    always is room.
    """

    tokens: Tensor
    weights: Tensor
    counts: Tensor
    state: Any
    order: RowOrder | None = None
    overflow: Tensor | None = None


@runtime_checkable
class Dispatcher(Protocol):
    """Moves tokens to the ranks that hold their experts, and the outputs back."""

    def dispatch(self, tokens: Tensor, routing: Routing) -> Dispatched: ...

    def combine(self, expert_output: Tensor, state: Any) -> Tensor: ...


@runtime_checkable
class OverlappingDispatcher(Dispatcher, Protocol):
    """A dispatcher that can overlap other work with its communication: dispatch is finish(start(...))."""

    def start_dispatch(self, tokens: Tensor, routing: Routing) -> Any: ...

    def finish_dispatch(self, sending: Any) -> Dispatched: ...


# -- bounds on the rows of a rank, without a number from the device ----------------------------------


def rank_capacity(tokens: int, routing: Routing, place: ExpertPlacement, factor: float | None) -> int:
    """Rows of `tokens` tokens for the experts of one rank: factor times the mean, rounded up, but not more than there
    can be; None: as many as there can be."""
    # A token's experts are distinct, so a rank gets it at most once for each expert that it holds.
    most = tokens * min(routing.topk, place.num_local)
    return most if factor is None else min(most, math.ceil(tokens * routing.topk / place.ep.size * factor))


def clip_counts(counts: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """Rows of experts [..., n] -> those among the first `room` of all n, and whether any is not: [] bool"""
    ends = counts.cumsum(-1)
    # counts 3 4 2, room 5: ends 3 7 9, clamped 3 5 5, differences 3 2 0.
    fitting = ends.clamp(max=room).diff(dim=-1, prepend=torch.zeros_like(ends[..., :1]))
    return fitting, (ends[..., -1] > room).any()


def invalidate(weights: Tensor, overflow: Tensor) -> Tensor:
    """NaN in place of all weights if rows were left out, so that the step fails instead of going on without them."""
    return weights.masked_fill(overflow, math.nan)
