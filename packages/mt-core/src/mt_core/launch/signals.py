"""Signals to the launcher: the first is forwarded to the ranks, which finish their step and save; the second kills."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

PASSED_AS = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGHUP: signal.SIGTERM,  # a closed terminal also ends the run with a checkpoint
}
INTERRUPTED_STATUS = 75
"""Exit status of a run that a signal ended with a checkpoint; sysexits.h: EX_TEMPFAIL, try again later. Statuses of 128
and more are of processes that the signal itself ended."""
REPLACED = (*PASSED_AS, signal.SIGQUIT)
"""Signals whose handlers torch elastic sets when it starts processes."""


def signal_name(number: int) -> str:
    """SIGTERM for 15. Most real-time signals have no name in Python."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class ForwardedSignals:
    """Enter before the ranks start, so that exit restores the original handlers; call `install` once they run.

    Python allows handlers in the main thread only; in other threads signals keep their default effect.
    """

    def __init__(self, forward: Callable[[signal.Signals], None], kill: Callable[[], None]) -> None:
        self.received: list[signal.Signals] = []
        self._forward = forward
        self._kill = kill
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> ForwardedSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in REPLACED}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        for number, handler in self._before.items():
            # SIGQUIT gets its original handler back, as elastic's would raise in the launcher.
            signal.signal(number, self._receive if number in PASSED_AS else handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        if len(self.received) == 1:
            self._forward(PASSED_AS[signal.Signals(number)])
        else:
            self._kill()
