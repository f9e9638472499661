"""The account of a run's time in its events and in the last lines of its log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from mt_core.launch.phases import Phases
from mt_core.parallel.context import is_writer
from mt_core.parallel.first_rank import all_gather_objects
from mt_core.run_events import account, event, read_events
from mt_core.train.callbacks import Run
from mt_core.train.reporting.event_log import StatusFile, status_interval
from mt_core.train.reporting.run_summary import time_lines
from mt_core.train.time_parts import TimeParts

T = TypeVar("T")


def waited_for(items: Iterator[T], time: TimeParts) -> Iterator[T]:
    """The same items; the time until each is there is that of waiting for data."""
    while True:
        with time("data_wait"):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def account_time(run: Run) -> None:
    """The time of all ranks by part, as an event. Collective over the world."""
    run.event("parts", ranks=all_gather_objects(run.engine.time.totals(), run.ctx.world))


def report_time(run: Run) -> None:
    """The account of the whole run, in the log's last lines. Collective over the world."""
    account_time(run)
    if run.directory is None or not is_writer():
        return
    whole = account([*read_events(run.directory.path), event("end", run.state.iteration)])
    if whole is not None:
        for line in time_lines(whole, run.config.logging.failures_per_node_day, run.ctx.world.size):
            run.message(line)


def start_status(run: Run, phases: Phases) -> StatusFile | None:
    """What shows each second where this rank is; None without a run directory."""
    interval = status_interval(run.config.logging.status_interval, run.ctx.world.size)
    if run.directory is None or interval is None:
        return None
    status = StatusFile(run.directory.path, phases, run, interval)
    status.start()
    return status
