"""The state of a run as its files tell it: the one answer of `mt watch`, `mt report` and `mt ctl`. Needs no torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mt_core.run_events import HANG, Event

SILENT = 30.0
"""Seconds without a sign after which a process whose machine cannot be asked counts as silent."""
GONE = 5.0
"""Seconds without a sign after which a process of this machine that is not there counts as gone. A process of another
container has another number here, and gives a sign each second."""
USUAL_STEPS = 10.0
"""Usual steps that pass without a new one, from which on a run counts as stalled; never less than HANG seconds."""
MOST_RANKS = 4
"""Ranks of one place that are named one by one."""
Kind = Literal["unknown", "training", "stalled", "silent", "finished", "stopped", "failed", "died"]


@dataclass(frozen=True)
class Stall:
    """seconds: since the last new phase or event, until now or until the last sign. where: the phase and part of each
    rank."""

    seconds: float
    where: str

    def __str__(self) -> str:
        return f"no step for {_duration(self.seconds)} ({self.where})"


@dataclass(frozen=True)
class RunState:
    """kind: `stopped` before its end on purpose, `failed` by an error, `died` without a word (a kill, a lost machine),
    `stalled` while its processes give signs and take no step.

    step: the last one known. time: of the end, or of the last sign; None where there is none. reason: why it stopped or
    failed. stall: of a run that is stalled, or was when it gave its last sign.
    """

    kind: Kind
    step: int = 0
    time: float | None = None
    reason: str | None = None
    stall: Stall | None = None

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
                return f"its process is gone, the last sign was {ago} ago{self._before()}"
            case "silent":
                return f"silent for {ago}{self._before()}"
            case "stalled":
                return str(self.stall)
            case "unknown":
                return ""
        return self.kind

    def _before(self) -> str:
        return "" if self.stall is None else f"; before it {self.stall}"


def run_state(
    events: Sequence[Event],
    status: Sequence[Mapping[str, Any]] = (),
    now: float = 0.0,
    last_line: float | None = None,
    step_seconds: float | None = None,
) -> RunState:
    """State of the newest process of a run.

    status: of the ranks (status/rank-N.json). now: seconds since the epoch. last_line: when the last line of
    metrics.jsonl was written. step_seconds: of a usual step; None where it is not known.
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
    moved = max(float(process[-1]["time"]), last_line or 0.0)
    if now - last > GONE and _is_gone(process[0], signs):
        return RunState("died", step, last, stall=_stall(signs, moved, last, step_seconds))
    if now - last > SILENT:
        return RunState("silent", step, last, stall=_stall(signs, moved, last, step_seconds))
    stall = _stall(signs, moved, now, step_seconds)
    return RunState("training" if stall is None else "stalled", step, last, stall=stall)


def _stall(signs: Sequence[Mapping[str, Any]], moved: float, until: float, step_seconds: float | None) -> Stall | None:
    """moved: when the run wrote an event or a line of its log last. None for a run that took a step, or entered another
    phase, not longer ago than is usual."""
    known = [entry for entry in signs if "since" in entry]
    if not known:
        return None
    # Steps, evaluations and saves are phases, each of which a rank enters anew: one that moves is enough.
    seconds = until - max(moved, *(float(entry["since"]) for entry in known))
    return Stall(seconds, _places(known)) if seconds > max(HANG, USUAL_STEPS * (step_seconds or 0.0)) else None


def _places(signs: Sequence[Mapping[str, Any]]) -> str:
    """ "rank 0, rank 1 in step/other"; with phases, and parts of the time where they are known."""
    ranks: dict[str, list[str]] = {}
    for entry in signs:
        place = "/".join(str(entry[key]) for key in ("phase", "part") if entry.get(key))
        ranks.setdefault(place, []).append(f"rank {entry.get('rank', 0)}")
    several = {
        place: ", ".join(names) if len(names) <= MOST_RANKS else f"{len(names)} ranks" for place, names in ranks.items()
    }
    return "; ".join(f"{names} in {place}" for place, names in several.items())


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
