"""`alltoall`: each row is sent only to the rank of its expert.

A row is sent once over ep. The ranks that share the expert's matrices (etp, usually in one node) then all-gather
their rows. The way back is the inverse: partial outputs are reduce-scattered over etp and sent back over ep.

How many rows are sent depends on the router. By default ranks exchange the numbers, and the host reads them while the
device permutes rows. With `static_shape` every rank has equally many positions for each other one, of which some are
empty, and the host reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mt_core.train.host_transfer import HostTransfer
from mt_moe.dispatchers.config import ExchangeConfig
from mt_moe.dispatchers.exchange import AllToAll, all_to_all, gather_counts, gather_rows_of, sum_rows_to
from mt_moe.dispatchers.interface import Dispatched, ExpertPlacement, clip_counts, invalidate, rank_capacity
from mt_moe.permutation import (
    Permutation,
    Routing,
    RowOrder,
    first_positions,
    permute_numbers,
    sort_by,
    sort_by_expert,
    sort_by_rank,
    sort_present,
)


@dataclass(frozen=True)
class Sizes:
    """Positions to and from each ep rank (send, receive), and those that each etp rank received (shared).

    chunks: [etp, ep, experts of this rank], the rows of each expert in the received blocks, in the order in which they
    are stored. full: no position is empty."""

    send: list[int]
    receive: list[int]
    shared: list[int]
    chunks: Tensor
    full: bool = True


@dataclass(frozen=True)
class State:
    """home: the order in which rows were sent; None: they stayed."""

    home: RowOrder | None
    sizes: Sizes | None


@dataclass(frozen=True)
class Sending:
    """Rows in flight. overflow: see Dispatched."""

    rows: Tensor
    weights: Tensor
    counts: Tensor
    by_expert: RowOrder
    sizes: Sizes | None = None
    exchanges: tuple[AllToAll, AllToAll] | None = None
    """Those of the rows and of the weights."""
    overflow: Tensor | None = None


# Example: ep = 2, experts 0 1 on rank 0 and 2 3 on rank 1. Rows for experts 0 to 3: rank 0 has 1 2 0 1, rank 1 2 0 3 0.
#   rank 0 sends 3 rows to itself and 1 to rank 1, and receives 3 + 2: chunks [[1, 2], [2, 0]]
#   rank 1 sends 2 rows to rank 0 and 3 to itself, and receives 1 + 3: chunks [[0, 1], [3, 0]]
# Received rows are ordered by sending rank and then by expert; _by_local_expert() orders them by expert.
class AllToAllDispatcher:
    """Sends each token to the ranks of its experts, and the outputs back, by all-to-alls over ep."""

    def __init__(self, placement: ExpertPlacement, config: ExchangeConfig | None = None) -> None:
        self.placement = placement
        self.config = config or ExchangeConfig()

    @property
    def static_shape(self) -> bool:
        return self.config.static_shape

    def dispatch(self, tokens: Tensor, routing: Routing) -> Dispatched:
        return self.finish_dispatch(self.start_dispatch(tokens, routing))

    def start_dispatch(self, tokens: Tensor, routing: Routing) -> Sending:
        place = self.placement
        # Nothing is sent: the experts permute the tokens themselves, by the order that is passed to them.
        if place.ep.size == place.etp.size == 1:
            permutation, counts = sort_by_expert(routing, place.kernels)
            weights = permute_numbers(routing.weights, permutation)
            return Sending(tokens, weights, counts, RowOrder(permutation, routing.topk))
        if not (self.static_shape and routing.training):
            return self._send_agreed(tokens, routing)
        return self._send_padded(tokens, routing) if routing.padded_to else self._send_bounded(tokens, routing)

    def finish_dispatch(self, sending: Sending) -> Dispatched:
        rows, weights, sizes = sending.rows, sending.weights, sending.sizes
        if sending.exchanges is not None:
            of_rows, of_weights = sending.exchanges
            rows, weights = of_rows.wait(rows), of_weights.wait(weights)
        if sizes is None:
            return Dispatched(rows, weights, sending.counts, State(None, None), sending.by_expert)
        # Each etp rank received the rows of its own ep group. All of them compute a part of each row, so they need all
        # rows.
        rows = gather_rows_of(rows, self.placement.etp, sizes.shared)
        weights = gather_rows_of(weights, self.placement.etp, sizes.shared)
        by_local = self._by_local_expert(sizes)
        if by_local is not None:
            weights = permute_numbers(weights, by_local.permutation)
        # [experts of this rank], over all etp and ep ranks
        counts = sizes.chunks.sum((0, 1))
        return Dispatched(rows, weights, counts, State(sending.by_expert, sizes), by_local, sending.overflow)

    def combine(self, expert_output: Tensor, state: State) -> Tensor:
        if state.sizes is None or state.home is None:
            return expert_output
        # etp ranks have partial sums of every row; each gets the complete ones of the rows that it received.
        rows = sum_rows_to(expert_output, self.placement.etp, state.sizes.shared)
        # Send and receive counts change places on the way back.
        return state.home.unpermute(all_to_all(rows, self.placement.ep, state.sizes.receive, state.sizes.send))

    def _send_agreed(self, tokens: Tensor, routing: Routing) -> Sending:
        """Exactly the rows that were sent. The host reads their numbers after all is launched that does not need
        them."""
        permutation, counts = sort_by_expert(routing, self.placement.kernels)
        # The transfer of the numbers overlaps with the permutation below, whose size does not depend on them.
        chunks, numbers = self._start_agreeing(counts)
        by_expert = RowOrder(permutation, routing.topk)
        rows, weights = by_expert.permute(tokens), permute_numbers(routing.weights, permutation)
        sizes = self._agreed(chunks, numbers)
        sent = sum(sizes.send)
        # The rows of dropped choices are at the end.
        if sent < len(rows):  # choices were dropped
            rows, weights = rows[:sent], weights[:sent]
            by_expert = replace(by_expert, permutation=first_positions(permutation, sent))
        return self._send(rows, weights, counts, by_expert, sizes)

    def _send_padded(self, tokens: Tensor, routing: Routing) -> Sending:
        """Every rank has `padded_to` rows for each expert."""
        place, rows = self.placement, routing.padded_to
        assert rows is not None
        permutation, counts = sort_by_expert(routing, place.kernels)
        # [etp, ep, experts of this rank]
        chunks = torch.full((place.etp.size, place.ep.size, place.num_local), rows, device=counts.device)
        return self._send_equal(tokens, routing.weights, permutation, counts, rows * place.num_local, chunks)

    def _send_bounded(self, tokens: Tensor, routing: Routing) -> Sending:
        """Every rank has room for the same number of rows for each rank. Without a capacity they always fit."""
        place = self.placement
        room = rank_capacity(len(tokens), routing, place, self.config.expert_rank_capacity_factor)
        # A block of `room` positions for each ep rank, in each of which the first ones are filled.
        permutation, counts = sort_by_rank(routing, place.ep.size, room, place.kernels)
        # [ep, experts of a rank]
        fitting, overflow = clip_counts(counts.view(place.ep.size, -1), room)
        weights = invalidate(routing.weights, overflow)
        # The counts are still exchanged, on the device; the host reads none.
        chunks = self._chunks(self._from_ep(fitting.flatten()))
        sending = self._send_equal(tokens, weights, permutation, counts, room, chunks)
        assert sending.sizes is not None
        return replace(sending, sizes=replace(sending.sizes, full=False), overflow=overflow)

    def _send_equal(
        self, tokens: Tensor, weights: Tensor, permutation: Permutation, counts: Tensor, room: int, chunks: Tensor
    ) -> Sending:
        """`room` positions to and from every rank."""
        place, by_expert = self.placement, RowOrder(permutation, weights.shape[1])
        send = [room] * place.ep.size
        sizes = Sizes(send, send, [sum(send)] * place.etp.size, chunks)
        rows, weights = by_expert.permute(tokens), permute_numbers(weights, permutation)
        return self._send(rows, weights, counts, by_expert, sizes)

    def _send(self, rows: Tensor, weights: Tensor, counts: Tensor, by_expert: RowOrder, sizes: Sizes) -> Sending:
        ep = self.placement.ep
        if ep.size == 1:
            return Sending(rows, weights, counts, by_expert, sizes)
        # Two messages, as rows and weights differ in shape and dtype, in the same order on all ranks.
        of_weights, of_rows = (AllToAll(ep, sizes.send, sizes.receive) for _ in range(2))
        weights = of_weights.start(weights)
        return Sending(of_rows.start(rows), weights, counts, by_expert, sizes, (of_rows, of_weights))

    def _start_agreeing(self, counts: Tensor) -> tuple[Tensor, HostTransfer]:
        """The chunks, and on their way to the host the numbers of rows to and from each rank."""
        from_ep = self._from_ep(counts)
        chunks = self._chunks(from_ep)
        # [ep]
        to_ep = counts.view(self.placement.ep.size, -1).sum(1)
        return chunks, HostTransfer.start(torch.cat([to_ep, from_ep.sum(1), chunks.sum((1, 2))]))

    def _agreed(self, chunks: Tensor, transfer: HostTransfer) -> Sizes:
        """The only host synchronization."""
        numbers, ranks = [int(number) for number in transfer.result()], self.placement.ep.size
        return Sizes(numbers[:ranks], numbers[ranks : 2 * ranks], numbers[2 * ranks :], chunks)

    def _from_ep(self, counts: Tensor) -> Tensor:
        """[E] rows of this rank -> [ep, experts of this rank] rows of each rank"""
        place = self.placement
        return gather_counts(counts, place.ep)[:, place.first_local : place.first_local + place.num_local]

    def _chunks(self, from_ep: Tensor) -> Tensor:
        place = self.placement
        gathered = gather_counts(from_ep.flatten(), place.etp)
        return gathered.view(place.etp.size, place.ep.size, place.num_local)

    def _by_local_expert(self, sizes: Sizes) -> RowOrder | None:
        """Rows arrive grouped by rank, then by expert; None: there is one expert, so the rows are already in order."""
        local, kernels = self.placement.num_local, self.placement.kernels
        if not sizes.full:
            return RowOrder(sort_present(self._experts_in_blocks(sizes), local, kernels)[0])
        if local == 1:
            return None
        # Blocks of rows in the order in which they lie: etp rank, ep rank, expert.
        chunks = sizes.chunks.flatten()
        experts = torch.arange(len(chunks), device=chunks.device) % local
        # output_size saves the host wait in which repeat_interleave would find it.
        return RowOrder(sort_by(experts.repeat_interleave(chunks, output_size=sum(sizes.shared)), kernels))

    def _experts_in_blocks(self, sizes: Sizes) -> Tensor:
        """The expert of each received position; the number of experts for an empty one."""
        # [etp * ep, experts of this rank]: where each expert's rows end inside the block of a rank
        ends = sizes.chunks.flatten(0, 1).cumsum(1)
        positions = torch.arange(sizes.receive[0], device=ends.device).repeat(len(ends), 1)
        # Positions behind the last end give the number of experts, which sort_present() drops.
        return torch.searchsorted(ends, positions, right=True).flatten()


def build_alltoall(config: ExchangeConfig, placement: ExpertPlacement) -> AllToAllDispatcher:
    return AllToAllDispatcher(placement, config)
