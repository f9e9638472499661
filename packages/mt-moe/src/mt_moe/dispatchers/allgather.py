"""`allgather`: every rank gathers all tokens and keeps those of its experts. Few messages; the traffic grows with the
number of ranks, not with top-k."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mt_core.parallel.context import Axis
from mt_moe.dispatchers.config import NoOptions
from mt_moe.dispatchers.interface import Dispatched, ExpertPlacement
from mt_moe.exchange import gather_counts, gather_rows_of, sum_rows_to
from mt_moe.permutation import Permutation, permute, permute_numbers, sort_by_expert, unpermute
from mt_moe.routing.result import Routing


@dataclass(frozen=True)
class State:
    """sizes: for each gathered axis, the number of tokens of each of its ranks."""

    topk: int
    by_expert: Permutation
    sizes: list[tuple[Axis, list[int]]]


class AllGatherDispatcher:
    """Gathers the tokens of all ranks, keeps those of its experts, and reduce-scatters the outputs."""

    def __init__(self, placement: ExpertPlacement) -> None:
        self.placement = placement
        self.axes = [axis for axis in (placement.etp, placement.ep) if axis.size > 1]

    def dispatch(self, tokens: Tensor, routing: Routing) -> Dispatched:
        sizes, padded_to = self._agree(len(tokens), routing.padded_to or 0, tokens.device)
        experts, weights, kept = routing.experts, routing.weights, routing.kept
        for axis, numbers in sizes:
            tokens, experts, weights = (gather_rows_of(x, axis, numbers) for x in (tokens, experts, weights))
            kept = None if kept is None else gather_rows_of(kept, axis, numbers)
        local = self._local(Routing(experts, weights, routing.num_experts, kept, padded_to or None))
        by_expert, counts = sort_by_expert(local, self.placement.kernels)
        rows, weights = permute(tokens, by_expert, local.topk), permute_numbers(weights, by_expert)
        return Dispatched(rows, weights, counts, State(local.topk, by_expert, sizes))

    def combine(self, expert_output: Tensor, state: State) -> Tensor:
        total = unpermute(expert_output, state.by_expert, state.topk)
        for axis, numbers in reversed(state.sizes):
            total = sum_rows_to(total, axis, numbers)
        return total

    def _agree(self, tokens: int, padded_to: int, device: torch.device) -> tuple[list[tuple[Axis, list[int]]], int]:
        """The number of tokens of each rank, axis by axis, and the padded rows per expert over all ranks."""
        found = []
        for axis in self.axes:
            gathered = gather_counts(torch.tensor([tokens, padded_to], device=device), axis)
            sizes, places = gathered.unbind(1)
            tokens, padded_to = int(sizes.sum()), int(places.sum())
            found.append((axis, sizes.tolist()))
        return found, padded_to

    def _local(self, routing: Routing) -> Routing:
        """The choices of this rank's experts, numbered from 0; all others are marked as dropped."""
        place = self.placement
        if place.ep.size == 1:
            return routing
        numbers = routing.experts - place.first_local
        ours = (numbers >= 0) & (numbers < place.num_local)
        if routing.kept is not None:
            ours &= routing.kept
        numbers = numbers.clamp(0, place.num_local - 1)
        return Routing(numbers, routing.weights, place.num_local, ours, routing.padded_to)


def build_allgather(config: NoOptions, placement: ExpertPlacement) -> AllGatherDispatcher:
    return AllGatherDispatcher(placement)
