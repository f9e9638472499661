"""Medians of alternating calls. On a GPU: the time that it needs for them, without that of the host to launch them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar, cast

import torch

from mt_core._torch_compat import spin_cuda
from mt_tools.bench.timing import Call, alternating, elapsed

HEAD_START = 2.0
"""How much longer the device is held than the host took to launch the same calls before."""
LONGEST_HOLD = 0.5
FLUSHED_CACHES = 4
"""Size of the buffer that is read to evict everything else from the L2 cache, in sizes of that cache."""
CALIBRATION_CYCLES = 10_000_000
Mark = TypeVar("Mark")


def medians(calls: Mapping[str, Sequence[Call]], device: torch.device, rounds: int) -> dict[str, float]:
    """Median seconds of a call of each kind; the kinds alternate.

    calls: of a kind, the same work on different buffers. On a GPU they follow one another in one measurement, so that
    none finds its inputs in the L2 cache or leaves its output there unwritten.
    """
    if device.type == "cuda":
        queue = CudaQueue(device)
        runs: dict[str, Call] = {name: partial(device_seconds, queue, several) for name, several in calls.items()}
        taken = alternating(runs, rounds, measure=lambda run: cast(float, run()))
    else:
        taken = alternating({name: several[0] for name, several in calls.items()}, rounds)
    return {name: statistics.median(times) for name, times in taken.items()}


class DeviceQueue(Protocol, Generic[Mark]):
    """A stream of a device, which executes in order what the host launches."""

    def drain(self) -> None:
        """Wait until everything launched is done."""
        ...

    def flush_cache(self) -> None:
        """Launch reads that leave nothing of earlier calls in the L2 cache."""
        ...

    def hold(self, seconds: float) -> None:
        """Launch work that keeps the device busy for this time."""
        ...

    def mark(self) -> Mark:
        """Launch a timestamp."""
        ...

    def between(self, first: Mark, last: Mark) -> float:
        """Seconds between two timestamps, after waiting for the last."""
        ...


def device_seconds(queue: DeviceQueue[Mark], calls: Sequence[Call]) -> float:
    """Mean seconds of the calls on the device.

    All are launched while the device is held, so that it executes them without gaps. Results are kept until the end:
    a buffer that is used again while its old content is still in the cache would not be written to memory.
    """
    launching = elapsed(lambda: [call() for call in calls])
    queue.drain()
    queue.flush_cache()
    queue.hold(min(HEAD_START * launching, LONGEST_HOLD))
    first = queue.mark()
    kept = [call() for call in calls]
    last = queue.mark()
    taken = queue.between(first, last)
    del kept
    return taken / len(calls)


class CudaQueue:
    """The current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer = torch.zeros(FLUSHED_CACHES * cache // 4, dtype=torch.int32, device=device)
        self._cycles_per_second = self._calibrate()

    def drain(self) -> None:
        torch.cuda.synchronize(self._buffer.device)

    def flush_cache(self) -> None:
        self._buffer.amax()  # read, not written: written lines would go to memory while the calls are timed

    def hold(self, seconds: float) -> None:
        spin_cuda(int(seconds * self._cycles_per_second))

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def _calibrate(self) -> float:
        spin_cuda(CALIBRATION_CYCLES)  # the clock rises from idle
        first = self.mark()
        spin_cuda(CALIBRATION_CYCLES)
        return CALIBRATION_CYCLES / self.between(first, self.mark())
