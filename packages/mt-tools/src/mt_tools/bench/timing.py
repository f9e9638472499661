"""Times of alternating calls: `mt bench` and the scripts in bench/ share this. Imports no torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

Call = Callable[[], object]
Times = Mapping[str, Sequence[float]]
"""Seconds of each call in each round."""
WARM_UP = 3


def elapsed(call: Call, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call. clock: `time.process_time` counts those of the processor."""
    started = clock()
    call()
    return clock() - started


def alternating(
    calls: Mapping[str, Call], rounds: int, *, measure: Callable[[Call], float] = elapsed, warm_up: int = WARM_UP
) -> dict[str, list[float]]:
    """Times of rounds in which each call is done once, so that disturbances of the machine affect all of them alike.
    Each round begins with another call. warm_up: rounds that are not counted."""
    names = list(calls)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + warm_up):
        # Rotated: none always follows the same one, whose data is in the caches.
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            spent = measure(calls[name])
            if number >= warm_up:
                taken[name].append(spent)
    return taken


def ratio(times: Times, above: str, below: str) -> float:
    """Median over the rounds of the ratio within a round: what slows the machine slows both sides."""
    # Not the ratio of medians: a round is short, and a disturbance lasts longer than one.
    return statistics.median(a / b for a, b in zip(times[above], times[below], strict=True))
