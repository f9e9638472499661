"""The interface of token dispatchers. Third-party dispatchers import this.

    dispatched = dispatcher.dispatch(tokens, routing)     # tokens [T, H] of this rank
    output = experts(dispatched.tokens, ...)              # as dispatched.tokens, weights applied
    y = dispatcher.combine(output, dispatched.state)      # [T, H]: for each token the sum over its experts

Both are collective over the ranks that hold the experts, and differentiable: backward sends the gradients of tokens
and weights along the inverse path. combine also sums over ranks that share an expert's matrices (etp).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from mt_core.parallel.context import Axis, ParallelContext
from mt_moe.permutation import RowKernels, RowOrder
from mt_moe.routing.result import Routing


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
