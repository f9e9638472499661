"""Recording the timeline of a pipeline step, and writing it as a Chrome trace or an SVG image."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.parallel.context import Axis
from mt_core.parallel.pipeline.schedule_tables import Action, Kind
from mt_core.parallel.pipeline.timeline import Span, Timeline, draw

Moment = Callable[[], float]
"""Returns seconds since the recording began; on a GPU known once the device has reached the event."""

KINDS = list(Kind)


class ScheduleRecorder:
    """Records the spans of this rank since `begin`. On a GPU these are device times, by CUDA events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spans: list[tuple[Action, Moment, Moment]] = []
        self._now: Callable[[], Moment] = _host_clock()

    def begin(self, axis: Axis) -> None:
        """Clear the recorded spans, and synchronize the start of all ranks of the pipeline. Collective."""
        self._spans.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        # No rank leaves the barrier before the last one has arrived, so the zeros of the ranks' clocks agree to within
        # its latency. Clocks of different hosts are never compared.
        if axis.size > 1:
            dist.barrier(group=axis.group)
        self._now = _device_clock() if self.device.type == "cuda" else _host_clock()

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        start = self._now()
        yield
        self._spans.append((action, start, self._now()))

    def spans(self) -> tuple[Span, ...]:
        """On a GPU this synchronizes with the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return tuple(Span(action, start(), end()) for action, start, end in self._spans)

    def gather(self, axis: Axis) -> Timeline:
        """The spans of all ranks of the pipeline, on each of them. Collective."""
        local_rows = _to_rows(self.spans()).to(self.device)
        if axis.size == 1:
            return Timeline((_from_rows(local_rows),))
        length = torch.tensor([len(local_rows)], device=self.device)
        lengths = [torch.empty_like(length) for _ in range(axis.size)]
        dist.all_gather(lengths, length, group=axis.group)
        # all_gather needs equal shapes, and ranks have different numbers of actions.
        longest = max(int(count) for count in lengths)
        padded = torch.cat([local_rows, local_rows.new_zeros(longest - len(local_rows), local_rows.shape[1])])
        # Each [longest, 5].
        rows = [torch.empty_like(padded) for _ in range(axis.size)]
        dist.all_gather(rows, padded, group=axis.group)
        return Timeline(tuple(_from_rows(rank_rows[: int(n)]) for rank_rows, n in zip(rows, lengths, strict=True)))


def _host_clock() -> Callable[[], Moment]:
    zero = time.perf_counter()

    def now() -> Moment:
        moment = time.perf_counter() - zero
        return lambda: moment

    return now


# An event's time is unknown until the device has reached it. Reading it at once would make the host wait for the device
# at every action and change what is measured; the returned functions read it after the step.
def _device_clock() -> Callable[[], Moment]:
    def event() -> torch.cuda.Event:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    zero = event()

    def now() -> Moment:
        mark = event()
        # elapsed_time is in milliseconds.
        return lambda: zero.elapsed_time(mark) / 1000.0

    return now


def _to_rows(spans: tuple[Span, ...]) -> Tensor:
    """[spans, 5] fp64: kind, stage, micro-batch, start, end"""
    # fp64 holds the integers exactly and the times to far below a nanosecond.
    rows = [(KINDS.index(s.action.kind), s.action.stage, s.action.micro_batch, s.start, s.end) for s in spans]
    # The view makes [0, 5] of an empty list.
    return torch.tensor(rows, dtype=torch.float64).view(-1, 5)


def _from_rows(rows: Tensor) -> tuple[Span, ...]:
    return tuple(
        Span(Action(KINDS[int(kind)], int(stage), int(number)), start, end)
        for kind, stage, number, start, end in rows.tolist()
    )


def write_trace(timeline: Timeline, path: Path) -> None:
    """`.json`: a Chrome trace (chrome://tracing, Perfetto), which `read_trace` reads too; `.svg`: a picture.

    Raises ConfigError for another ending.
    """
    if path.suffix == ".json":
        path.write_text(json.dumps(to_chrome(timeline)), encoding="utf-8")
    elif path.suffix == ".svg":
        path.write_text(draw(timeline), encoding="utf-8")
    else:
        raise ConfigError(f"a schedule is written as .json (Chrome trace) or .svg (picture), not as {path.name!r}")


def to_chrome(timeline: Timeline) -> dict[str, Any]:
    """Trace Event Format, one process a rank, times in microseconds."""
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(timeline.ranks):
        # "ph" is the event's phase: M for metadata, X for a complete event with its duration.
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"pipeline rank {rank}"}})
        events += [_event(rank, span) for span in spans]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"ranks": len(timeline.ranks), "bubble_fraction": timeline.bubble_fraction},
    }


def _event(rank: int, span: Span) -> dict[str, Any]:
    kind, stage, number = span.action
    return {
        "name": f"{stage}{kind.value}{number}",
        "cat": kind.value,
        "ph": "X",
        "pid": rank,
        "tid": 0,
        "ts": span.start * 1e6,
        "dur": (span.end - span.start) * 1e6,
        "args": {"stage": stage, "micro_batch": number},
    }


def read_trace(path: Path) -> Timeline:
    """What `write_trace` wrote as `.json`."""
    content = json.loads(path.read_text(encoding="utf-8"))
    ranks: list[list[Span]] = [[] for _ in range(content["otherData"]["ranks"])]
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            action = Action(Kind(event["cat"]), event["args"]["stage"], event["args"]["micro_batch"])
            start = event["ts"] / 1e6
            ranks[event["pid"]].append(Span(action, start, start + event["dur"] / 1e6))
    return Timeline(tuple(map(tuple, ranks)))
