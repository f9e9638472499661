"""Medians of alternating calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

WARM_UP = 3


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call; on a GPU between two events, so launch overhead counts only if it is the bottleneck."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def medians(calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, float]:
    """Seconds of each call. Calls alternate, so that disturbances of the machine affect all of them alike."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            taken[name].append(seconds(call, device))
    return {name: statistics.median(times) for name, times in taken.items()}
