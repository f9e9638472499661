"""Where the time of a rank goes: seconds of each named part, which add up to the time since the process began.

    start          before the engine is built: the interpreter, imports, the process group
    load           building the model, reading a checkpoint
    data           building data sets
    data_wait      waiting for the next batch
    forward, backward, optimizer
    graph          both passes and the reduction, where train.cuda_graphs=step launches them as one
    communication  waiting for other ranks: collectives that nothing hides, and a pipeline's other stages
    save, evaluate
    other          everything else

One part is current at any time. On a GPU the host runs ahead of the device, so that the host's time of a step is
divided among its parts in proportion to the device's, which events measure.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from mt_core.parallel.context import Axis, ParallelContext

ON_DEVICE = ("forward", "backward", "graph", "communication", "optimizer")
"""Parts of a step, whose kernels a GPU runs later than the host launches them."""
DEVICE_WAIT = "device_wait"
"""Waiting for the device's results: the host's share of the parts above, among which it is divided."""


@dataclass
class TimeParts:
    """axes: whose waiting is taken out of the part in which it happened and counted as communication."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    axes: Sequence[Axis] = ()
    """Those of several ranks."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    current: str = "load"
    _since: float = field(default_factory=time.perf_counter)
    _waited: float = 0.0
    _marks: list[tuple[str, Any]] = field(default_factory=list)
    """On a GPU: the part that began, and an event of the device at its beginning."""
    _device: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _divided_before: float = 0.0

    def observe(self, device: torch.device, ctx: ParallelContext) -> None:
        """The device of the steps, and the axes whose collectives are counted."""
        self.device = device
        # Axes may share one object where they have the same ranks.
        self.axes = list({id(axis): axis for axis in ctx.axes.values() if axis.size > 1}.values())

    def enter(self, part: str) -> str:
        """Begin a part, which lasts until the next. Returns the part that ended."""
        before, now = self.current, time.perf_counter()
        waited = sum(axis.waited.seconds for axis in self.axes)
        self.seconds[before] += now - self._since - (waited - self._waited)
        self.seconds["communication"] += waited - self._waited
        self.current, self._since, self._waited = part, now, waited
        on_device = self.device.type == "cuda" and (part in ON_DEVICE or before in ON_DEVICE)
        # An event that is captured belongs to the graph: it has no time, and asking for it is an error.
        if on_device and not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((part, event))
        return before

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """A part within another, which goes on afterwards."""
        outer = self.enter(part)
        try:
            yield
        finally:
            self.enter(outer)

    def totals(self) -> dict[str, float]:
        """Seconds by part until now. On a GPU called where the host has waited for the device."""
        self.enter(self.current)
        self._divide_by_device()
        return {part: seconds for part, seconds in self.seconds.items() if seconds > 0}

    def total(self) -> float:
        """Seconds of all parts until now."""
        return sum(self.seconds.values()) + time.perf_counter() - self._since

    def count_start(self) -> None:
        """Count the time of this process before this object was made."""
        self.seconds["start"] += max(since_process_began() - self.total(), 0.0)

    def _divide_by_device(self) -> None:
        """Divide what the host measured of a step's parts as the device's times of the parts are divided."""
        finished = [(part, event) for part, event in self._marks if event.query()]
        if len(finished) < 2:
            return
        shares: defaultdict[str, float] = defaultdict(float)
        for (part, begin), (_, end) in pairwise(finished):
            if part in ON_DEVICE:
                shares[part] += begin.elapsed_time(end)
        self._marks = self._marks[len(finished) - 1 :]
        host = sum(self.seconds[part] for part in (*ON_DEVICE, DEVICE_WAIT)) - self._divided_before
        if (total := sum(shares.values())) > 0 and host > 0:
            for part in ON_DEVICE:
                self._device[part] += host * shares[part] / total
                self.seconds[part] = self._device[part]
            self.seconds[DEVICE_WAIT] = 0.0
            self._divided_before = sum(self._device.values())


def since_process_began() -> float:
    """Seconds since the kernel started this process; 0 where it does not say."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as stat:
            # The name of the program, in parentheses, may have spaces; the 20th field after it is the start in ticks.
            ticks = int(stat.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
