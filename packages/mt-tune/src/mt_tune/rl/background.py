"""One round of drawing in a thread of its own, while this one trains."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch


class BackgroundRound:
    """At most one at a time. On a GPU it has a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="generation")
        self._running: Future[None] | None = None
        self.is_closing = False
        """Asks the round to end early."""

    @property
    def is_running(self) -> bool:
        return self._running is not None

    def start(self, draw: Callable[[], None]) -> None:
        assert self._running is None
        # After what this thread has launched: the copy of the weights.
        on_gpu = self.device.type == "cuda"
        stream = torch.cuda.Stream(self.device) if on_gpu else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        self._running = self._threads.submit(_on_stream, stream, draw)

    def finish(self) -> None:
        """Waits for the round, and raises its error."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        self.is_closing = True
        self._threads.shutdown(wait=True)


def _on_stream(stream: Any, draw: Callable[[], None]) -> None:
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        draw()
    if stream is not None:
        stream.synchronize()
