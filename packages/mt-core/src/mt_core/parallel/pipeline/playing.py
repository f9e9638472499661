"""When each action of an order starts, if computation and communication take given times."""

from __future__ import annotations

from collections.abc import Callable

from mt_core.parallel.pipeline.garbage import without_garbage_collection
from mt_core.parallel.pipeline.orders import IS_BACKWARD, Action, Kind, Order, num_stages_of, reader


@without_garbage_collection()
def play(
    order: Order, duration: Callable[[Action], float], delay: Callable[[int, int], float] = lambda maker, reader: 0.0
) -> list[list[float]]:
    """Start of each action, in the shape of the order.

    A rank starts an action when it has ended the one before and when what the action needs of a neighbouring stage
    is there: the end of the action that made it plus delay(stage that made it, stage that reads it). Raises
    ValueError when ranks would wait for one another for ever.
    """
    num_stages = num_stages_of(order)
    starts: list[list[float]] = [[] for _ in order]
    free_at = [0.0] * len(order)
    arrivals: dict[tuple[bool, int, int], float] = {}
    waiting: dict[tuple[bool, int, int], int] = {}  # what a rank cannot go on without -> that rank
    runnable = list(range(len(order)))
    while runnable:
        rank = runnable.pop()
        actions, own = order[rank], starts[rank]
        while len(own) < len(actions):
            action = actions[len(own)]
            needed = awaited(action, num_stages)
            if needed is not None and needed not in arrivals:
                waiting[needed] = rank
                break
            start = free_at[rank] if needed is None else max(free_at[rank], arrivals.pop(needed))
            own.append(start)
            free_at[rank] = start + duration(action)
            receiver = reader(action, num_stages)
            if receiver is not None:
                product = (action.kind is Kind.FORWARD, receiver, action.micro_batch)
                arrivals[product] = free_at[rank] + delay(action.stage, receiver)
                if product in waiting:
                    runnable.append(waiting.pop(product))
    if waiting:
        raise ValueError(f"the order cannot go on: ranks {sorted(waiting.values())} wait for one another")
    return starts


def awaited(action: Action, num_stages: int) -> tuple[bool, int, int] | None:
    """What the action needs of another stage: (whether hidden states or a gradient, its own stage, micro-batch).

    What it needs of its own stage stands before it in the order.
    """
    if action.kind is Kind.FORWARD and action.stage > 0:
        return True, action.stage, action.micro_batch
    if action.kind in IS_BACKWARD and action.stage < num_stages - 1:
        return False, action.stage, action.micro_batch
    return None
