"""SIGTERM and SIGINT end training after the current step; a second signal ends it immediately."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class StopSignals:
    """Context manager: the first signal sets a flag, the second has its default effect.

    Python allows handlers in the main thread only; in other threads signals keep their default effect.
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
        # Only a flag: a handler may interrupt any bytecode, and the loop reads it between steps.
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
