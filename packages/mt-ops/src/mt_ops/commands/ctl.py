"""`mt ctl`: ask a running training for something."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from mt_core.errors import ConfigError, did_you_mean
from mt_core.plugins import load_plugins
from mt_core.run_events import EVENTS_FILE, Event, read_events
from mt_core.run_requests import (
    RunAnswer,
    RunRequest,
    read_answer,
    require_run_directory,
    withdraw,
    write_request,
)
from mt_core.run_state import RunState, run_state
from mt_core.specs import RUN_REQUESTS
from mt_ops.reading.mt_run import read_status

POLL, LOOK = 0.2, 2.0
"""Seconds between looks for the answer, and for the state of the run."""
NOT_CARRIED_OUT, NO_ANSWER = 1, 75


def ctl(
    run: Annotated[Path, typer.Argument(help="Run directory.", metavar="RUN", show_default=False)],
    command: Annotated[
        str,
        typer.Argument(help="save, eval, stop, generate, set, note, profile, or one of a plugin.", show_default=False),
    ],
    argument: Annotated[
        list[str] | None,
        typer.Argument(
            help="TEXT of generate and note, KEY=VALUE of set, a reason of stop, steps of profile.", show_default=False
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer; 0 does not wait.", min=0.0)] = 600.0,
) -> None:
    """Ask the training that runs in a directory to do something after its current step, and print its answer.

    Works from any machine that sees the directory, by the user who started the run. The request and its answer are in
    the run's events. Exit code 1 when the run refuses or has ended, 75 when it has not answered in time: the request is
    then withdrawn, if the run has not read it, as it is where a signal ends the command.
    """
    requests = load_plugins()[RUN_REQUESTS]
    if command not in requests.names():
        known = ", ".join(requests.names())
        raise ConfigError(
            f"mt ctl {run} {command}: a run can be asked for {known}{did_you_mean(command, requests.names())}"
        )
    text = " ".join(argument or [])
    if command == "set" and len(argument or []) > 1:
        raise ConfigError(f"mt ctl {run} set {text}: one KEY=VALUE at a time; quote a value that has spaces")
    require_run_directory(run)
    watched = WatchedState(run)
    _require_running(run, watched.look())
    if timeout == 0:
        request = write_request(run, command, text)
        typer.echo(f"asked {run} for {command} (request {request.id})")
        return
    with _signals_raise():
        request = write_request(run, command, text, timeout)
        try:
            answer = wait_for_answer(run, request, timeout, watched)
        except BaseException:
            typer.echo(_what_becomes_of(run, request), err=True)
            raise
    if answer is None:
        state = watched.look()
        if state.is_over and withdraw(run, request):
            _require_running(run, state)
        _report_silence(run, request, timeout)
        raise typer.Exit(NO_ANSWER)
    typer.echo(f"step {answer.iteration}: {answer.text}", err=not answer.ok)
    if not answer.ok:
        raise typer.Exit(NOT_CARRIED_OUT)


class WatchedState:
    """The state of a run directory; its files are read where they have changed, once in LOOK seconds."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._next, self._state = 0.0, RunState("unknown")
        self._events: list[Event] = []
        self._signature: tuple[int, int] | None = None

    def look(self) -> RunState:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LOOK
            if (signature := _signature(self.run / EVENTS_FILE)) != self._signature:
                self._signature, self._events = signature, read_events(self.run)
            self._state = run_state(self._events, read_status(self.run), time.time())
        return self._state


def _signature(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size


def wait_for_answer(run: Path, request: RunRequest, timeout: float, watched: WatchedState) -> RunAnswer | None:
    """The answer; None after so many seconds without one, or where the run ends without having answered."""
    end = time.monotonic() + timeout
    while (answer := read_answer(run, request)) is None and time.monotonic() < end:
        if watched.look().is_over:
            # What it answered as it ended.
            return read_answer(run, request)
        time.sleep(POLL)
    return answer


def _require_running(run: Path, state: RunState) -> None:
    """Exits where nothing can answer any more."""
    if not state.is_over:
        return
    now = time.time()
    when = "" if state.time is None else f" ({time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(state.time))})"
    typer.echo(
        f"{run} has ended at step {state.step:,}{when}: {state.text(now)}; nothing in it can answer. The same mt train "
        "continues a run that has steps left",
        err=True,
    )
    raise typer.Exit(NOT_CARRIED_OUT)


def _report_silence(run: Path, request: RunRequest, timeout: float) -> None:
    typer.echo(f"no answer of {run} in {timeout:g} s; {_what_becomes_of(run, request)}", err=True)


def _what_becomes_of(run: Path, request: RunRequest) -> str:
    """Withdraws the request if it was not read."""
    if withdraw(run, request):
        return "it has not read the request, which is withdrawn: is it running (mt watch shows it)?"
    return "it has read the request, and will do what it says"


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP leave the block by SystemExit, as SIGINT does by KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield  # which alone may handle signals
        return
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
