"""`alltoall`: each row is sent only to the rank of its expert.

A row is sent once over ep. The ranks that share the expert's matrices (etp, usually in one node) then all-gather
their rows. The way back is the inverse: partial outputs are reduce-scattered over etp and sent back over ep.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mt_moe.dispatchers.config import ExchangeConfig
from mt_moe.dispatchers.interface import Dispatched, ExpertPlacement
from mt_moe.exchange import AllToAll, all_to_all, gather_counts, gather_rows_of, sum_rows_to
from mt_moe.permutation import RowOrder, permute_numbers, sort_by, sort_by_expert
from mt_moe.routing.result import Routing


@dataclass(frozen=True)
class Sizes:
    """Row counts. send, receive: to and from each ep rank. shared: rows that each etp rank received.
    chunks: [etp, ep, experts of this rank], the sizes of the received chunks in the order in which they are stored."""

    send: list[int]
    receive: list[int]
    shared: list[int]
    chunks: Tensor


@dataclass(frozen=True)
class State:
    """home: the order in which rows were sent; None: they stayed."""

    home: RowOrder | None
    sizes: Sizes | None


@dataclass(frozen=True)
class Sending:
    """Rows in flight."""

    rows: Tensor
    weights: Tensor
    counts: Tensor
    by_expert: RowOrder
    sizes: Sizes | None
    exchange: AllToAll | None


class AllToAllDispatcher:
    """Sends each token to the ranks of its experts, and the outputs back, by all-to-alls over ep."""

    def __init__(self, placement: ExpertPlacement, config: ExchangeConfig | None = None) -> None:
        self.placement = placement
        self.static_shape = config is not None and config.static_shape

    def dispatch(self, tokens: Tensor, routing: Routing) -> Dispatched:
        return self.finish_dispatch(self.start_dispatch(tokens, routing))

    def start_dispatch(self, tokens: Tensor, routing: Routing) -> Sending:
        place = self.placement
        permutation, counts = sort_by_expert(routing, place.kernels)
        by_expert = RowOrder(permutation, routing.topk)
        weights = permute_numbers(routing.weights, permutation)
        sizes = self._sizes(counts, routing)
        if sizes is None:
            return Sending(tokens, weights, counts, by_expert, None, None)
        rows, exchange = by_expert.permute(tokens), None
        if place.ep.size > 1:
            weights = all_to_all(weights, place.ep, sizes.send, sizes.receive)
            exchange = AllToAll(place.ep, sizes.send, sizes.receive)
            rows = exchange.start(rows)
        return Sending(rows, weights, counts, by_expert, sizes, exchange)

    def finish_dispatch(self, sending: Sending) -> Dispatched:
        rows, weights, sizes = sending.rows, sending.weights, sending.sizes
        if sending.exchange is not None:
            rows = sending.exchange.wait(rows)
        if sizes is None:
            return Dispatched(rows, weights, sending.counts, State(None, None), sending.by_expert)
        rows = gather_rows_of(rows, self.placement.etp, sizes.shared)
        weights = gather_rows_of(weights, self.placement.etp, sizes.shared)
        by_local = self._by_local_expert(sizes)
        if by_local is not None:
            weights = permute_numbers(weights, by_local.permutation)
        counts = sizes.chunks.sum((0, 1))
        return Dispatched(rows, weights, counts, State(sending.by_expert, sizes), by_local)

    def combine(self, expert_output: Tensor, state: State) -> Tensor:
        if state.sizes is None or state.home is None:
            return expert_output
        rows = sum_rows_to(expert_output, self.placement.etp, state.sizes.shared)
        return state.home.unpermute(all_to_all(rows, self.placement.ep, state.sizes.receive, state.sizes.send))

    def _sizes(self, counts: Tensor, routing: Routing) -> Sizes | None:
        """How many rows come from which rank; None: all stay here."""
        place = self.placement
        if place.ep.size == place.etp.size == 1:
            return None
        if self.static_shape and routing.training and routing.padded_to is not None:
            return self._padded(routing.padded_to, counts.device)
        return self._agree(counts)

    def _padded(self, rows: int, device: torch.device) -> Sizes:
        """Every rank has `rows` rows for each expert, so that nothing has to be exchanged."""
        place = self.placement
        send = [rows * place.num_local] * place.ep.size
        chunks = torch.full((place.etp.size, place.ep.size, place.num_local), rows, device=device)
        return Sizes(send, send, [sum(send)] * place.etp.size, chunks)

    def _agree(self, counts: Tensor) -> Sizes:
        """The only host synchronization."""
        place = self.placement
        ours = slice(place.first_local, place.first_local + place.num_local)
        from_ep = gather_counts(counts, place.ep)[:, ours]
        chunks = gather_counts(from_ep.flatten(), place.etp).view(place.etp.size, place.ep.size, place.num_local)
        numbers = torch.cat([counts.view(place.ep.size, -1).sum(1), from_ep.sum(1), chunks.sum((1, 2))]).tolist()
        send, receive = numbers[: place.ep.size], numbers[place.ep.size : 2 * place.ep.size]
        return Sizes(send, receive, numbers[2 * place.ep.size :], chunks)

    def _by_local_expert(self, sizes: Sizes) -> RowOrder | None:
        """Rows arrive grouped by rank, then by expert; None: there is one expert, so the rows are already in order."""
        if self.placement.num_local == 1:
            return None
        chunks = sizes.chunks.flatten()
        experts = torch.arange(len(chunks), device=chunks.device) % self.placement.num_local
        rows = sum(sizes.shared)
        return RowOrder(sort_by(experts.repeat_interleave(chunks, output_size=rows), self.placement.kernels))


def build_alltoall(config: ExchangeConfig, placement: ExpertPlacement) -> AllToAllDispatcher:
    return AllToAllDispatcher(placement, config)
