"""Schedule tables: for each rank of a pipeline its actions, in order.

A table lists computation only. A micro-batch passes forward through stages 0, 1, ... and its gradient back; an
action depends on the previous one of its rank and on its input from the neighbouring stage.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


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
