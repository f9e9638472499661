"""Sends and receives put into an order, so that no rank can wait for another for ever."""

from __future__ import annotations

from collections.abc import Sequence

from mt_core.parallel.pipeline.garbage import without_garbage_collection
from mt_core.parallel.pipeline.orders import Action, Kind, Order, num_stages_of, reader
from mt_core.parallel.pipeline.playing import play

Moment = tuple[float, int, int]
"""Time; then transfers (0) before computation (1); then the rank that makes what is sent."""


@without_garbage_collection()
def with_communication(order: Order, rank_of_stage: Sequence[int]) -> Order:
    """The order with a send behind each action whose product another rank reads, and a receive on that rank.

    The order is played with actions of equal length. A send and its receive are entered at the same moment: the
    receive is posted as early as there is something to receive, often while the rank computes something else. All
    ranks meet their transfers in one common sequence, which is what NCCL needs: its operations of one group run in
    the sequence in which they were started. Raises ValueError when the order cannot be played to its end.
    """
    num_stages = num_stages_of(order)
    events: list[list[tuple[Moment, Action]]] = [[] for _ in order]
    for rank, (actions, starts) in enumerate(zip(order, play(order, lambda action: 1.0), strict=True)):
        for action, start in zip(actions, starts, strict=True):
            events[rank].append(((start, 1, rank), action))
            receiver = reader(action, num_stages)
            if receiver is None or rank_of_stage[receiver] == rank:
                continue
            send, receive = TRANSFERS[action.kind is Kind.FORWARD]
            moment = (start + 1.0, 0, rank)
            events[rank].append((moment, Action(send, action.stage, action.micro_batch)))
            events[rank_of_stage[receiver]].append((moment, Action(receive, receiver, action.micro_batch)))
    return [[action for _, action in sorted(own, key=lambda event: event[0])] for own in events]


TRANSFERS = {
    True: (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD),
    False: (Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD),
}
