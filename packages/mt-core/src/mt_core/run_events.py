"""events.jsonl of a run directory: what happened when, one JSON object a line; and the account of its time.

Each has `time` (seconds since the epoch), `iteration` and `kind`:

    start     a process of the run began: resumed_from, world_size, host, pid, began (when the process was started),
              before (the last sign of a process that had not ended: its time, phase, and since when it was in it),
              data (fingerprints of the training data and of the tokenizer), files (of each file that the configuration
              names for them its path, bytes, time of writing and a digest; `mt_core.data.file_contents`)
    data      first_sample, datasets: of each data set of a blend its name, weight, and the samples and tokens that this
              process drew from it, from first_sample on; at saves and at the end
    message   text, as the log has it; warning: the same, of something to look at
    sample    prompt, text: generated while training
    evaluation, save (path), control (request, answer), changed (key, before, after)
    parts     ranks: seconds of each part of the time of each rank since its process began; at saves and at the end
    failed    text: the error that ended the process
    end       reason: null where training is finished, else why it stopped
A run that is continued appends. Needs no torch.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EVENTS_FILE = "events.jsonl"
Event = Mapping[str, Any]
HANG = 30.0
"""Seconds in one phase without an event before the last sign of a process, from which on it counts as having hung."""
TRAINING = ("forward", "backward", "graph", "communication", "optimizer")
"""Parts of the time that steps take by themselves."""


def event(kind: str, iteration: int, **fields: Any) -> dict[str, Any]:
    return {"time": time.time(), "iteration": iteration, "kind": kind, **fields}


def read_events(run_dir: Path) -> list[Event]:
    """Those of a run directory; none where the file is missing. An incomplete last line is left out."""
    path = run_dir / EVENTS_FILE
    if not path.exists():
        return []
    return list(_complete(path.read_text(encoding="utf-8").splitlines()))


def _complete(lines: Iterable[str]) -> Iterator[Event]:
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "kind" in entry:
            yield entry


# -- the account of the time -------------------------------------------------------------------------


@dataclass(frozen=True)
class TimeAccount:
    """Seconds of an allocation by part, the mean over ranks, from the first start to the last event.

    Beside the parts that ranks measure: `repeated`, steps that a later process took again; `idle`, between the end of
    one process and the start of the next; `hang`, in the last phase of a process that did not end by itself but still
    gave signs; `lost`, the rest of a process that ended without a last account.
    """

    parts: Mapping[str, float]
    total: float
    starts: int = 1
    saves: Sequence[float] = field(default_factory=tuple)
    """Seconds that training stood still for each save."""

    @property
    def effective(self) -> float:
        """Fraction of the time in steps that were not repeated."""
        return max(sum(self.parts.get(part, 0.0) for part in TRAINING), 0.0) / self.total if self.total > 0 else 0.0

    def lines(self) -> list[str]:
        """For the log: the largest parts first."""
        shares = sorted(self.parts.items(), key=lambda item: -item[1])
        visible = [(part, seconds / self.total) for part, seconds in shares if seconds >= 0.0005 * self.total]
        named = ", ".join(f"{part} {share:.1%}" for part, share in visible)
        return [f"time: {self.total:.1f} s, {self.effective:.1%} of it training steps; {named}"]

    def save_interval(self, failures_per_day: float) -> float | None:
        """Seconds between saves that lose least (Young 1974, Daly 2006): sqrt(2 d M) - d, d the seconds of a save and
        M the mean time between failures. None without a save."""
        if not self.saves:
            return None
        stall, between = sum(self.saves) / len(self.saves), 86400.0 / failures_per_day
        return max(math.sqrt(2.0 * stall * between) - stall, 0.0) if stall < 2.0 * between else between

    def failure_cost(self, interval: float) -> float:
        """Seconds that a failure costs with so many seconds between saves: half of them again, and a start."""
        startup = sum(self.parts.get(part, 0.0) for part in ("start", "load", "data")) / max(self.starts, 1)
        return interval / 2.0 + startup


def account(events: Sequence[Event], status: Sequence[Mapping[str, Any]] = ()) -> TimeAccount | None:
    """Time of all processes of a run. None for a run without a start. status: the last signs of its ranks."""
    processes = _processes(events)
    if not processes:
        return None
    parts: defaultdict[str, float] = defaultdict(float)
    saves: list[float] = []
    for number, process in enumerate(processes):
        following = processes[number + 1] if number + 1 < len(processes) else None
        sign = following[0].get("before") if following is not None else _last_sign(status)
        end = _end(process, sign)
        _add(parts, _of_process(process, following, end, _hang(process, sign)))
        saves += [float(entry["seconds"]) for entry in process if entry["kind"] == "save" and "seconds" in entry]
        if following is not None:
            parts["idle"] += max(_began(following) - end, 0.0)
    total = _end(processes[-1], _last_sign(status)) - _began(processes[0])
    return TimeAccount({part: seconds for part, seconds in parts.items() if seconds > 0}, total, len(processes), saves)


def _last_sign(status: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Last sign of the rank that is in its phase the longest; None where a rank has ended, or none has said
    anything."""
    known = [entry for entry in status if "since" in entry and "time" in entry]
    if not known or any(entry.get("phase") == "ended" for entry in known):
        return None
    return min(known, key=lambda entry: float(entry["since"]))


def _end(process: Sequence[Event], sign: Mapping[str, Any] | None) -> float:
    """When a process did something last: its last event, or a later sign of one that has not ended by itself."""
    last = float(process[-1]["time"])
    return last if sign is None or process[-1]["kind"] == "end" else max(last, float(sign["time"]))


def _hang(process: Sequence[Event], sign: Mapping[str, Any] | None) -> float:
    """Seconds in one phase until the last sign, without an event of the process; 0 below HANG."""
    if sign is None or process[-1]["kind"] == "end":
        return 0.0
    seconds = float(sign["time"]) - max(float(sign["since"]), float(process[-1]["time"]))
    return seconds if seconds >= HANG else 0.0


def _processes(events: Sequence[Event]) -> list[list[Event]]:
    """The events of each process, which begin with its start."""
    processes: list[list[Event]] = []
    for entry in events:
        if entry["kind"] == "start":
            processes.append([])
        if processes:
            processes[-1].append(entry)
    return processes


def _began(process: Sequence[Event]) -> float:
    return float(process[0].get("began", process[0]["time"]))


def _of_process(
    process: Sequence[Event], following: Sequence[Event] | None, end: float, hang: float
) -> dict[str, float]:
    """Its parts. Time in steps that the following process took again is `repeated`."""
    accounts = [entry for entry in process if entry["kind"] == "parts"]
    parts: defaultdict[str, float] = defaultdict(float)
    lasted = end - _began(process)
    if accounts:
        for rank in accounts[-1]["ranks"]:
            _add(parts, {part: seconds / len(accounts[-1]["ranks"]) for part, seconds in rank.items()})
    # After its last account a process may have trained on until it died.
    unaccounted = max(lasted - sum(parts.values()), 0.0)
    parts["hang"] = min(hang, unaccounted)
    unaccounted -= parts["hang"]
    if following is not None and (again := _repeated_share(process, following)) > 0:
        for part in TRAINING:
            parts["repeated"] += parts[part] * again
            parts[part] *= 1.0 - again
        parts["repeated"] += unaccounted
    else:
        parts["lost" if not accounts or process[-1]["kind"] != "end" else "other"] += unaccounted
    return parts


def _add(parts: dict[str, float], more: Mapping[str, float]) -> None:
    for part, seconds in more.items():
        parts[part] += seconds


def _repeated_share(process: Sequence[Event], following: Sequence[Event]) -> float:
    """Share of the accounted steps of a process that are after the one that the next process began with."""
    first, accounted = process[0]["iteration"], max(entry["iteration"] for entry in process if entry["kind"] != "start")
    taken = accounted - first
    return min(max(accounted - following[0]["iteration"], 0) / taken, 1.0) if taken > 0 else 0.0
