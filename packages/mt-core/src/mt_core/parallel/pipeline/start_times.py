"""Start times of the actions in a schedule table, for given durations of computation and communication."""

from __future__ import annotations

from collections.abc import Callable

from mt_core.parallel.pipeline.gc_control import without_garbage_collection
from mt_core.parallel.pipeline.schedule_tables import IS_BACKWARD, Action, Kind, ScheduleTable, num_stages_of, reader


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
        actions, own = order[rank], starts[rank]
        while len(own) < len(actions):
            action = actions[len(own)]
            needed = awaited(action, num_stages)
            if needed is not None and needed not in arrivals:
                waiting[needed] = rank
                break
            # pop: an input has one reader, and the dictionary stays as small as the number of micro-batches in flight.
            start = free_at[rank] if needed is None else max(free_at[rank], arrivals.pop(needed))
            own.append(start)
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
