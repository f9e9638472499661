"""The state of a run as its files tell it: the one answer of `mt watch`, `mt report` and `mt ctl`. Needs no torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mt_core.run_events import Event

SILENT = 30.0
"""Seconds without a sign after which a process whose machine cannot be asked counts as silent."""
GONE = 5.0
"""Seconds without a sign after which a process of this machine that is not there counts as gone. A process of another
container has another number here, and gives a sign each second."""
Kind = Literal["unknown", "training", "silent", "finished", "stopped", "failed", "died"]


@dataclass(frozen=True)
class RunState:
    """kind: `stopped` before its end on purpose, `failed` by an error, `died` without a word (a kill, a lost machine).

    step: the last one known. time: of the end, or of the last sign; None where there is none. reason: why it stopped or
    failed.
    """

    kind: Kind
    step: int = 0
    time: float | None = None
    reason: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether no process trains any more."""
        return self.kind in ("finished", "stopped", "failed", "died")

    def text(self, now: float) -> str:
        """For a reader; "" where nothing is known."""
        ago = "" if self.time is None else _duration(max(now - self.time, 0.0))
        match self.kind:
            case "stopped":
                return f"stopped by {self.reason}"
            case "failed":
                return f"failed: {self.reason}" if self.reason else "ended by an error"
            case "died":
                return f"its process is gone, the last sign was {ago} ago"
            case "silent":
                return f"silent for {ago}"
            case "unknown":
                return ""
        return self.kind


def run_state(
    events: Sequence[Event], status: Sequence[Mapping[str, Any]] = (), now: float = 0.0, last_line: float | None = None
) -> RunState:
    """State of the newest process of a run.

    status: of the ranks (status/rank-N.json). now: seconds since the epoch. last_line: when the last line of
    metrics.jsonl was written.
    """
    place = max((place for place, entry in enumerate(events) if entry["kind"] == "start"), default=None)
    if place is None:
        return RunState("unknown")
    process = events[place:]
    began = float(process[0]["time"])
    signs = [entry for entry in status if float(entry.get("time", 0.0)) >= began]
    step = max(int(entry.get("iteration", 0)) for entry in [*process, *signs])
    for entry in process:
        if entry["kind"] == "end":
            reason = entry.get("reason")
            return RunState("stopped" if reason else "finished", step, float(entry["time"]), reason)
        if entry["kind"] == "failed":
            return RunState("failed", step, float(entry["time"]), str(entry.get("text", "")))
    last = max(float(entry["time"]) for entry in [process[-1], *signs])
    last = last if last_line is None else max(last, last_line)
    if signs and any(entry.get("phase") == "ended" for entry in signs):
        return RunState("failed", step, last)
    if now - last > GONE and _is_gone(process[0], signs):
        return RunState("died", step, last)
    return RunState("silent" if now - last > SILENT else "training", step, last)


def _is_gone(start: Event, signs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a process of the run was on this machine and is there no more."""
    here = [entry for entry in [start, *signs] if entry.get("host") == socket.gethostname() and "pid" in entry]
    return any(not _is_there(int(entry["pid"])) for entry in here)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # of another user
    return True


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
