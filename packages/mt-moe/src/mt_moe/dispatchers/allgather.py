"""`allgather`: every rank gathers all tokens and keeps those of its experts. Few messages; the traffic grows with the
number of ranks, not with top-k."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mt_core.parallel.context import Axis
from mt_moe.dispatchers.config import ExchangeConfig
from mt_moe.dispatchers.exchange import AllToAll, gather_counts, gather_rows_of, start_gather, sum_rows_to
from mt_moe.dispatchers.interface import Dispatched, ExpertPlacement, clip_counts, invalidate, rank_capacity
from mt_moe.permutation import Routing, RowOrder, first_positions, permute_numbers, sort_by_expert

Sizes = list[tuple[Axis, list[int]]]
"""For each gathered axis, the number of tokens of each of its ranks."""


@dataclass(frozen=True)
class Gathering:
    """Tokens in flight, and the routing of those of all ranks."""

    tokens: Tensor
    routing: Routing
    sizes: Sizes
    exchange: AllToAll | None
    room: int | None
    """Positions for the rows of this rank's experts; None: as many as there are rows."""


class AllGatherDispatcher:
    """Gathers the tokens of all ranks, keeps those of its experts, and reduce-scatters the outputs."""

    def __init__(self, placement: ExpertPlacement, config: ExchangeConfig | None = None) -> None:
        self.placement = placement
        self.config = config or ExchangeConfig()
        self.axes = [axis for axis in (placement.etp, placement.ep) if axis.size > 1]

    @property
    def static_shape(self) -> bool:
        return self.config.static_shape

    def dispatch(self, tokens: Tensor, routing: Routing) -> Dispatched:
        return self.finish_dispatch(self.start_dispatch(tokens, routing))

    def start_dispatch(self, tokens: Tensor, routing: Routing) -> Gathering:
        sizes, padded_to = self._sizes(tokens, routing)
        experts, weights, kept = routing.experts, routing.weights, routing.kept
        # First etp, then ep. The routing is gathered too, so that each rank finds the rows of its experts by itself.
        for axis, numbers in sizes:
            experts, weights = gather_rows_of(experts, axis, numbers), gather_rows_of(weights, axis, numbers)
            kept = None if kept is None else gather_rows_of(kept, axis, numbers)
        # Only the last gather of tokens is asynchronous: it starts from the result of the one before.
        for axis, numbers in sizes[:-1]:
            tokens = gather_rows_of(tokens, axis, numbers)
        exchange = None
        if sizes:
            exchange, tokens = start_gather(tokens, *sizes[-1])
        # [n, k] of the n tokens of all ranks
        everyone = Routing(experts, weights, routing.num_experts, kept, padded_to)
        return Gathering(tokens, everyone, sizes, exchange, self._room(everyone, routing.training))

    def finish_dispatch(self, gathering: Gathering) -> Dispatched:
        tokens = gathering.tokens
        if gathering.exchange is not None:
            tokens = gathering.exchange.wait(tokens)
        local, overflow = self._local(gathering.routing), None
        by_expert, counts = sort_by_expert(local, self.placement.kernels)
        weights = local.weights
        # Choices of other ranks' experts are marked as dropped, so the permutation has empty positions at its end.
        if self.placement.ep.size > 1 and local.padded_to is None:
            room = gathering.room
            if room is None:
                # A host wait: the number of this rank's rows.
                room = int(counts.sum())
            else:
                counts, overflow = clip_counts(counts, room)
                weights = invalidate(weights, overflow)
            # Without this the rows would be as many as the choices of all ranks.
            by_expert = first_positions(by_expert, room)
        weights = permute_numbers(weights, by_expert)
        return Dispatched(tokens, weights, counts, gathering.sizes, RowOrder(by_expert, local.topk), overflow)

    def combine(self, expert_output: Tensor, state: Sizes) -> Tensor:
        total = expert_output
        # Reduce-scatter sums the partial outputs of each token over all ranks, those of ep and those of etp.
        for axis, numbers in reversed(state):
            total = sum_rows_to(total, axis, numbers)
        return total

    def _sizes(self, tokens: Tensor, routing: Routing) -> tuple[Sizes, int | None]:
        """The number of tokens of each rank, axis by axis, and the padded rows per expert over all ranks."""
        if not (self.static_shape and routing.training):
            return self._agree(len(tokens), routing.padded_to, tokens.device)
        count, axis_sizes = len(tokens), []
        for axis in self.axes:
            axis_sizes.append((axis, [count] * axis.size))
            count *= axis.size
        ranks = self.placement.etp.size * self.placement.ep.size
        # An expert gets padded_to rows from every rank.
        return axis_sizes, None if routing.padded_to is None else routing.padded_to * ranks

    def _room(self, everyone: Routing, training: bool) -> int | None:
        if not (self.static_shape and training):
            return None
        return rank_capacity(len(everyone.experts), everyone, self.placement, self.config.expert_rank_capacity_factor)

    def _agree(self, tokens: int, padded_to: int | None, device: torch.device) -> tuple[Sizes, int | None]:
        """The same read from all ranks. Synchronizes with the device."""
        axis_sizes, places = [], padded_to or 0
        for axis in self.axes:
            gathered = gather_counts(torch.tensor([tokens, places], device=device), axis).tolist()
            sizes = [count for count, _ in gathered]
            tokens, places = sum(sizes), sum(padded for _, padded in gathered)
            axis_sizes.append((axis, sizes))
        return axis_sizes, places or None

    def _local(self, routing: Routing) -> Routing:
        """The choices of this rank's experts, numbered from 0; all others are marked as dropped."""
        place = self.placement
        if place.ep.size == 1:
            return routing
        numbers = routing.experts - place.first_local
        ours = (numbers >= 0) & (numbers < place.num_local)
        if routing.kept is not None:
            ours &= routing.kept
        # Numbers of other ranks' experts would be out of range; `ours` marks them as dropped.
        numbers = numbers.clamp(0, place.num_local - 1)
        return Routing(numbers, routing.weights, place.num_local, ours, routing.padded_to)


def build_allgather(config: ExchangeConfig, placement: ExpertPlacement) -> AllGatherDispatcher:
    return AllGatherDispatcher(placement, config)
