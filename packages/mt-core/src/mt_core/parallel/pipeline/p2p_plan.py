"""Inserts sends and receives into a schedule table, free of deadlocks."""

from __future__ import annotations

from collections.abc import Sequence

from mt_core.parallel.pipeline.gc_control import without_garbage_collection
from mt_core.parallel.pipeline.schedule_tables import Action, Kind, ScheduleTable, num_stages_of, reader
from mt_core.parallel.pipeline.start_times import start_times

Moment = tuple[float, int, int]
"""Time; then transfers (0) before computation (1); then the rank that makes what is sent."""


@without_garbage_collection()
def with_communication(order: ScheduleTable, rank_of_stage: Sequence[int]) -> ScheduleTable:
    """The table with a send after each action whose result another rank needs, and a receive on that rank.

    The table is simulated with actions of equal duration. A send and its receive are inserted at the same simulated
    time: the receive is posted as soon as the data exist, often while the rank computes something else. All ranks
    launch their transfers in one common order. NCCL requires this: the operations of a group run in launch order.
    Raises ValueError when the table deadlocks.
    """
    # 1f1b, 2 ranks, 2 micro-batches, with start times of the actions and moments of the transfers:
    # rank 0: F0@0  send F0@1  F1@1  send F1@2           recv B0@3  B0@3             recv B1@5  B1@5
    # rank 1:       recv F0@1  F0@1  recv F1@2  B0@2     send B0@3  F1@3  B1@4       send B1@5
    # F1 is received before B0 is computed, so its transfer overlaps with B0.
    num_stages = num_stages_of(order)
    events: list[list[tuple[Moment, Action]]] = [[] for _ in order]
    for rank, (actions, starts) in enumerate(zip(order, start_times(order, lambda action: 1.0), strict=True)):
        for action, start in zip(actions, starts, strict=True):
            events[rank].append(((start, 1, rank), action))
            receiver = reader(action, num_stages)
            # Neighbouring stages of one rank exchange nothing.
            if receiver is None or rank_of_stage[receiver] == rank:
                continue
            send, receive = TRANSFERS[action.kind is Kind.FORWARD]
            # Durations are all 1.0, so a rank ends one action at a time and no two transfers have the same moment:
            # sorting by it gives one total order, the same on the two sides of every transfer.
            moment = (start + 1.0, 0, rank)
            events[rank].append((moment, Action(send, action.stage, action.micro_batch)))
            events[rank_of_stage[receiver]].append((moment, Action(receive, receiver, action.micro_batch)))
    # Sorted by the moment alone; the order of Kind has no meaning.
    return [[action for _, action in sorted(own, key=lambda event: event[0])] for own in events]


TRANSFERS = {
    True: (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD),
    False: (Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD),
}
