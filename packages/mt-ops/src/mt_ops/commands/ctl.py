"""`mt ctl`: ask a running training for something."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from mt_core.errors import ConfigError, did_you_mean
from mt_core.plugins import load_plugins
from mt_core.run_requests import RunAnswer, RunRequest, read_answer, withdraw, write_request
from mt_core.specs import RUN_REQUESTS

POLL = 0.2
"""Seconds between looks for the answer."""
NOT_CARRIED_OUT, NO_ANSWER = 1, 75


def ctl(
    run: Annotated[Path, typer.Argument(help="Run directory.", metavar="RUN", show_default=False)],
    command: Annotated[
        str, typer.Argument(help="save, eval, stop, generate, set, note, or one of a plugin.", show_default=False)
    ],
    argument: Annotated[
        list[str] | None,
        typer.Argument(help="TEXT of generate and note, KEY=VALUE of set, a reason of stop.", show_default=False),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer; 0 does not wait.", min=0.0)] = 600.0,
) -> None:
    """Ask the training that runs in a directory to do something after its current step, and print its answer.

    Works from any machine that sees the directory, by the user who started the run. The request and its answer are in
    the run's events. Exit code 1 when the run refuses, 75 when it has not answered in time: the request is then
    withdrawn, if the run has not read it.
    """
    requests = load_plugins()[RUN_REQUESTS]
    if command not in requests.names():
        known = ", ".join(requests.names())
        raise ConfigError(
            f"mt ctl {run} {command}: a run can be asked for {known}{did_you_mean(command, requests.names())}"
        )
    request = write_request(run, command, " ".join(argument or []))
    if timeout == 0:
        typer.echo(f"asked {run} for {command} (request {request.id})")
        return
    answer = wait_for_answer(run, request, timeout)
    if answer is None:
        _report_silence(run, request, timeout)
        raise typer.Exit(NO_ANSWER)
    typer.echo(f"step {answer.iteration}: {answer.text}", err=not answer.ok)
    if not answer.ok:
        raise typer.Exit(NOT_CARRIED_OUT)


def wait_for_answer(run: Path, request: RunRequest, timeout: float) -> RunAnswer | None:
    """None after so many seconds without one."""
    end = time.monotonic() + timeout
    while (answer := read_answer(run, request)) is None and time.monotonic() < end:
        time.sleep(POLL)
    return answer


def _report_silence(run: Path, request: RunRequest, timeout: float) -> None:
    withdrawn = withdraw(run, request)
    what = (
        "it has not read the request, which is withdrawn: is it running (mt watch shows it)?"
        if withdrawn
        else "it has read the request, and will do what it says"
    )
    typer.echo(f"no answer of {run} in {timeout:g} s; {what}", err=True)
