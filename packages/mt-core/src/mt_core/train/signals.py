"""SIGTERM and SIGINT end training after the step at hand; a second one ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class StopSignals:
    """A context in which the first signal is remembered and the second has its usual effect.

    Outside the main thread Python allows no handlers; then signals keep their usual effect.
    """

    CAUGHT = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._remember) for number in self.CAUGHT}
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
