"""Times of alternating calls: `mt bench` and the scripts in bench/ share this. Imports no torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch

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
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            spent = measure(calls[name])
            if number >= warm_up:
                taken[name].append(spent)
    return taken


def medians(calls: Mapping[str, Sequence[Call]], device: torch.device, rounds: int) -> dict[str, float]:
    """Median seconds of a call of each kind; the kinds alternate.

    calls: of a kind, the same work on different buffers. On a GPU they follow one another in one measurement, so that
    none finds its inputs in the L2 cache or leaves its output there unwritten.
    """
    return {name: statistics.median(times) for name, times in alternating_runs(calls, device, rounds).items()}


def alternating_runs(
    calls: Mapping[str, Sequence[Call]], device: torch.device, rounds: int
) -> Mapping[str, Sequence[float]]:
    if device.type != "cuda":
        return alternating({name: several[0] for name, several in calls.items()}, rounds)
    from mt_tools.bench.device_timing import CudaQueue, device_seconds

    queue = CudaQueue(device)
    runs: dict[str, Call] = {name: partial(device_seconds, queue, several) for name, several in calls.items()}
    return alternating(runs, rounds, measure=lambda run: cast(float, run()))


def ratio(times: Times, above: str, below: str) -> float:
    """Median over the rounds of the ratio within a round: what slows the machine slows both sides."""
    return statistics.median(a / b for a, b in zip(times[above], times[below], strict=True))
