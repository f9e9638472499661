"""How long an engine's forward passes take on its device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mt_infer.engine import InferenceEngine

Seconds = Callable[[], float]
"""The duration of a pass; waits for the device until it is known."""


class PassTimes:
    """Within its `with` block: the passes of an engine, eager ones and replays of its graphs, from the call until the
    device has computed the logits."""

    def __init__(self, engine: InferenceEngine) -> None:
        # What the engine takes logits from.
        self._sources: list[Any] = [source for source in (engine.runner, engine.graphs) if source is not None]
        self._begin = _begin_on_device if engine.ctx.device.type == "cuda" else _begin_on_host
        self._is_running = False
        self.passes: list[Seconds] = []

    @property
    def seconds(self) -> float:
        return sum(seconds() for seconds in self.passes)

    def __enter__(self) -> PassTimes:
        for source in self._sources:
            # On the instance, over the method of the class; __exit__ deletes it.
            source.logits = self._timed(source.logits)
        return self

    def __exit__(self, *error: object) -> None:
        for source in self._sources:
            del source.logits

    def _timed(self, logits: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            # A graph's first use runs and captures the runner's pass, where no event may be recorded.
            if self._is_running:
                return logits(*arguments)
            self._is_running, end = True, self._begin()
            try:
                found = logits(*arguments)
            finally:
                self._is_running = False
            self.passes.append(end())
            return found

        return timed


def _begin_on_host() -> Callable[[], Seconds]:
    started = time.perf_counter()

    def end() -> Seconds:
        duration = time.perf_counter() - started
        return lambda: duration

    return end


def _begin_on_device() -> Callable[[], Seconds]:
    # Events and no synchronization, so that the host prepares the sampling while the device computes, as without a
    # measurement. The device is idle at the beginning of a pass: the last one's tokens have been read.
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started.record()

    def seconds() -> float:
        ended.synchronize()
        return started.elapsed_time(ended) / 1000.0  # of milliseconds

    def end() -> Seconds:
        ended.record()
        return seconds

    return end
