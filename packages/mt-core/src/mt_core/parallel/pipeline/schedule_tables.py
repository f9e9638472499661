"""Schedule tables: for each rank of a pipeline its actions, in order.

A table lists computation only. A micro-batch passes forward through stages 0, 1, ... and its gradient back; an
action depends on the previous one of its rank and on its input from the neighbouring stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Literal, NamedTuple

from mt_core.parallel.pipeline.gc_control import without_garbage_collection


class Kind(StrEnum):
    """The letters are those of the zero-bubble paper (Qi et al., 2024)."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward pass: gradients of the stage's input and of its weights."""
    BACKWARD_INPUT = "I"
    """The gradient of the input only, which the previous stage waits for."""
    BACKWARD_WEIGHT = "W"
    """The gradients of the weights, which no other stage waits for."""
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"


class Action(NamedTuple):
    """`kind` for micro-batch number `micro_batch` in stage number `stage`."""

    kind: Kind
    stage: int
    micro_batch: int


ScheduleTable = list[list[Action]]
"""For each rank of the pipeline, its actions."""


# BACKWARD_WEIGHT is absent: nothing is sent after it, and it waits for nothing but its own BACKWARD_INPUT.
IS_BACKWARD = frozenset((Kind.BACKWARD, Kind.BACKWARD_INPUT))
"""The actions that produce the gradient for the previous stage."""


def reader(action: Action, num_stages: int) -> int | None:
    """The stage that depends on the action's result: the next for activations, the previous for a gradient."""
    if action.kind is Kind.BACKWARD_WEIGHT:
        return None
    # The last stage's forward pass and the first stage's backward pass have no reader.
    stage = action.stage + 1 if action.kind is Kind.FORWARD else action.stage - 1
    return stage if 0 <= stage < num_stages else None


def gpipe(num_ranks: int, num_micro_batches: int) -> ScheduleTable:
    """All forward passes, then all backward passes (Huang et al., 2018)."""
    return [
        [Action(kind, rank, number) for kind in (Kind.FORWARD, Kind.BACKWARD) for number in range(num_micro_batches)]
        for rank in range(num_ranks)
    ]


def one_forward_one_backward(num_ranks: int, num_micro_batches: int) -> ScheduleTable:
    """1F1B: the number of warm-up forward passes of a rank is the number of stages after it (PipeDream-Flush,
    Narayanan et al., 2020)."""
    # 3 ranks, 4 micro-batches:
    # rank 0: F0 F1 F2 B0 F3 B1 B2 B3
    # rank 1: F0 F1 B0 F2 B1 F3 B2 B3
    # rank 2: F0 B0 F1 B1 F2 B2 F3 B3
    # At most num_ranks - rank micro-batches are in flight on a rank, whatever their total. GPipe keeps all of them.
    return [_alternating(rank, num_ranks - 1 - rank, num_micro_batches) for rank in range(num_ranks)]


def _alternating(stage: int, ahead: int, num_micro_batches: int) -> list[Action]:
    # With fewer micro-batches than stages the warm-up is all there is.
    ahead = min(ahead, num_micro_batches)
    actions = [Action(Kind.FORWARD, stage, number) for number in range(ahead)]
    for number in range(num_micro_batches):
        # After the last forward pass only backward passes remain (cool-down).
        if ahead + number < num_micro_batches:
            actions.append(Action(Kind.FORWARD, stage, ahead + number))
        actions.append(Action(Kind.BACKWARD, stage, number))
    return actions


def forward_only(order: ScheduleTable) -> ScheduleTable:
    """The forward passes of a table, for evaluation."""
    return [[action for action in actions if action.kind is Kind.FORWARD] for actions in order]


def of_micro_batches(order: ScheduleTable, count: int) -> ScheduleTable:
    """The same table with the first `count` micro-batches only.

    Micro-batches do not depend on one another, so the table remains valid.
    """
    return [[action for action in actions if action.micro_batch < count] for actions in order]


def num_stages_of(order: ScheduleTable) -> int:
    # A table without actions has no stages (-1 + 1).
    return 1 + max((action.stage for actions in order for action in actions), default=-1)


# -- which rank of the pipeline holds which stages --------------------------------------------------------

Placement = Literal["loop", "v"]
"""loop: stage s on rank s mod ranks. v: ranks ascending, then descending: rank 0 holds the first and last stage."""


def ranks_of_stages(num_stages: int, num_ranks: int, placement: Placement) -> tuple[int, ...]:
    """The rank of each stage, in order."""
    if placement == "loop":
        return tuple(stage % num_ranks for stage in range(num_stages))
    # 3 ranks: stages 0 1 2 in round 0 are on ranks 0 1 2, stages 3 4 5 in round 1 on ranks 2 1 0. Stages 2 and 3 share
    # a rank, so nothing is sent at the turn; embedding and loss share rank 0.
    rounds = [divmod(stage, num_ranks) for stage in range(num_stages)]
    return tuple(place if number % 2 == 0 else num_ranks - 1 - place for number, place in rounds)


def stages_of_rank(rank: int, num_stages: int, num_ranks: int, placement: Placement) -> tuple[int, ...]:
    """Indices of the stages that `rank` holds, ascending."""
    ranks = ranks_of_stages(num_stages, num_ranks, placement)
    return tuple(stage for stage, owner in enumerate(ranks) if owner == rank)


# -- start times of the actions, for given durations of computation and communication ---------------------


@without_garbage_collection()
def start_times(
    order: ScheduleTable,
    duration: Callable[[Action], float],
    delay: Callable[[int, int], float] = lambda maker, reader: 0.0,
) -> list[list[float]]:
    """Start time of each action, in the shape of the table.

    A rank starts an action when the previous one has ended and its input from a neighbouring stage has arrived: the
    end of the producing action plus delay(producing stage, reading stage). Raises ValueError when the table
    deadlocks.
    """
    num_stages = num_stages_of(order)
    # Each rank is advanced until its next action misses an input. It continues when the rank that produces this input
    # reaches it. An action is visited once and each visit of a blocked rank follows one arrival, so the time is linear
    # in the size of the table. Which runnable rank is taken first does not change the result: an action's start depends
    # on its predecessors only.
    starts: list[list[float]] = [[] for _ in order]
    # End of the last action of each rank.
    free_at = [0.0] * len(order)
    # Inputs that were produced and not consumed yet -> their time of arrival. Keys as returned by awaited().
    arrivals: dict[tuple[bool, int, int], float] = {}
    waiting: dict[tuple[bool, int, int], int] = {}  # missing input -> the rank that is blocked on it
    runnable = list(range(len(order)))
    while runnable:
        rank = runnable.pop()
        actions, times = order[rank], starts[rank]
        while len(times) < len(actions):
            action = actions[len(times)]
            needed = awaited(action, num_stages)
            if needed is not None and needed not in arrivals:
                waiting[needed] = rank
                break
            # pop: an input has one reader, and the dictionary stays as small as the number of micro-batches in flight.
            start = free_at[rank] if needed is None else max(free_at[rank], arrivals.pop(needed))
            times.append(start)
            free_at[rank] = start + duration(action)
            receiver = reader(action, num_stages)
            if receiver is not None:
                product = (action.kind is Kind.FORWARD, receiver, action.micro_batch)
                arrivals[product] = free_at[rank] + delay(action.stage, receiver)
                if product in waiting:
                    runnable.append(waiting.pop(product))
    # No rank can run and some have actions left. With an acyclic order this cannot happen.
    if waiting:
        raise ValueError(f"the order cannot go on: ranks {sorted(waiting.values())} wait for one another")
    return starts


def awaited(action: Action, num_stages: int) -> tuple[bool, int, int] | None:
    """The action's input from another stage: (whether activations or a gradient, its own stage, micro-batch).

    Dependencies on its own stage precede it in the table.
    """
    if action.kind is Kind.FORWARD and action.stage > 0:
        return True, action.stage, action.micro_batch
    if action.kind in IS_BACKWARD and action.stage < num_stages - 1:
        return False, action.stage, action.micro_batch
    return None


# -- sends and receives, inserted without deadlocks -------------------------------------------------------

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
    return [[action for _, action in sorted(rank_events, key=lambda event: event[0])] for rank_events in events]


TRANSFERS = {
    True: (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD),
    False: (Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD),
}
