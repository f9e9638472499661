"""The logs of launched ranks, and the live view of one of them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from pathlib import Path
from typing import BinaryIO

LOGS = "logs"
TAIL_LINES, TAIL_BYTES = 30, 16384


def log_path(folder: Path, rank: int) -> Path:
    return folder / LOGS / f"rank-{rank}.log"


def keep_previous(log: Path) -> None:
    """Rename the log of the previous start to rank-N.previous.log."""
    with contextlib.suppress(FileNotFoundError):
        log.replace(log.with_suffix(".previous.log"))


def tail(path: Path) -> str:
    """The last lines of a log; nothing when there is none."""
    try:
        with path.open("rb") as file:
            # A log may be gigabytes long.
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-TAIL_LINES:])


class DelayedView:
    """Shows the output written to a log, delayed by half a second.

    When another rank fails, rank 0 prints errors about its lost peer. The delay gives the launcher time to learn of
    the failure and to show its cause first; the lines of rank 0 remain in the log only.
    """

    def __init__(self, path: Path, output: BinaryIO, delay: float = 0.5) -> None:
        self.path = path
        self.output = output
        self.delay = delay
        self._offset = 0
        self._waiting: deque[tuple[float, bytes]] = deque()

    def pump(self) -> None:
        """Read new output, and show the output that is old enough."""
        self._take()
        while self._waiting and self._waiting[0][0] + self.delay <= time.monotonic():
            self._write(self._waiting.popleft()[1])

    def finish(self) -> None:
        """Show all remaining output."""
        self._take()
        while self._waiting:
            self._write(self._waiting.popleft()[1])

    def _take(self) -> None:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return
        if new:
            self._offset += len(new)
            # The time of reading stands for that of writing; it is polled every 0.05 s.
            self._waiting.append((time.monotonic(), new))

    def _write(self, data: bytes) -> None:
        self.output.write(data)
        self.output.flush()
