"""What the ranks of a pipeline do, in which order: lists of actions, one list a rank.

An order names computation only. A micro-batch goes forward through stages 0, 1, ... and its gradient comes back;
an action waits for the one before it on its rank and for what it needs from the neighbouring stage.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The letters are those of the zero-bubble paper (Qi et al., 2023)."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward pass: gradients of the stage's input and of its weights."""
    BACKWARD_INPUT = "I"
    """The gradient of the input alone, which is what the stage before waits for."""
    BACKWARD_WEIGHT = "W"
    """The gradients of the weights, whenever there is time."""
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"


class Action(NamedTuple):
    """`kind` for micro-batch number `micro_batch` in stage number `stage`."""

    kind: Kind
    stage: int
    micro_batch: int


Order = list[list[Action]]
"""For each rank of the pipeline, its actions."""


IS_BACKWARD = frozenset((Kind.BACKWARD, Kind.BACKWARD_INPUT))
"""What makes the gradient that the stage before waits for."""


def reader(action: Action, num_stages: int) -> int | None:
    """The stage that waits for what the action makes: hidden states for the next, a gradient for the one before."""
    if action.kind is Kind.BACKWARD_WEIGHT:
        return None
    stage = action.stage + 1 if action.kind is Kind.FORWARD else action.stage - 1
    return stage if 0 <= stage < num_stages else None


def gpipe(num_ranks: int, num_micro_batches: int) -> Order:
    """All forward passes, then all backward passes (Huang et al., 2018)."""
    return [
        [Action(kind, rank, number) for kind in (Kind.FORWARD, Kind.BACKWARD) for number in range(num_micro_batches)]
        for rank in range(num_ranks)
    ]


def one_forward_one_backward(num_ranks: int, num_micro_batches: int) -> Order:
    """Each rank runs ahead by no more forward passes than there are stages behind it (PipeDream-Flush, Narayanan et
    al., 2020)."""
    return [_alternating(rank, num_ranks - 1 - rank, num_micro_batches) for rank in range(num_ranks)]


def _alternating(stage: int, ahead: int, num_micro_batches: int) -> list[Action]:
    ahead = min(ahead, num_micro_batches)
    actions = [Action(Kind.FORWARD, stage, number) for number in range(ahead)]
    for number in range(num_micro_batches):
        if ahead + number < num_micro_batches:
            actions.append(Action(Kind.FORWARD, stage, ahead + number))
        actions.append(Action(Kind.BACKWARD, stage, number))
    return actions


def forward_only(order: Order) -> Order:
    """The forward passes of an order, for evaluation."""
    return [[action for action in actions if action.kind is Kind.FORWARD] for actions in order]


def of_micro_batches(order: Order, count: int) -> Order:
    """The same order with the first `count` micro-batches alone.

    Micro-batches do not depend on one another, so that an order stays one when some are left out.
    """
    return [[action for action in actions if action.micro_batch < count] for actions in order]


def num_stages_of(order: Order) -> int:
    return 1 + max((action.stage for actions in order for action in actions), default=-1)
