"""Worker processes that call reward functions within a deadline, and are ended and replaced when they exceed it."""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mt_core.errors import ConfigError
from mt_tune.rewards.calling import Call, Failed, Judged, Outcome
from mt_tune.rewards.channels import LONGEST_REPLY, Channel
from mt_tune.rewards.references import FunctionReference
from mt_tune.rewards.worker import Setup

COMMAND = (sys.executable, "-m", "mt_tune.rewards.worker")
START_SECONDS = 300.0
"""For a process to import its functions, which may import torch on a busy machine."""
END_SECONDS = 2.0
"""For an idle process to end after its channel is closed."""


class WorkerPool:
    """Implements mt_tune.rewards.callers.Caller by processes that have all functions imported.

    functions: by their numbers. names: theirs, for messages. Raises ConfigError for a function that cannot be imported.
    """

    def __init__(
        self,
        functions: Mapping[int, FunctionReference],
        names: Mapping[int, str],
        *,
        workers: int,
        deadline_seconds: float,
        memory_mb: int,
    ) -> None:
        self._names, self._seconds = names, deadline_seconds
        setup = Setup(functions, list(sys.path), memory_mb)
        self._lifeline = Lifeline()
        self._start = lambda: _Worker(setup, self._lifeline)
        self._workers = [self._start() for _ in range(workers)]
        try:
            for worker in self._workers:
                self._wait_until_ready(worker)
        except BaseException:
            self.close()
            raise

    def run(self, calls: Sequence[Call], *, stop_at_failure: bool) -> list[Outcome | None]:
        run = _PoolRun(self, calls, stop_at_failure)
        try:
            return run.outcomes()
        finally:
            # After an exception, such as an interrupt: replies of this run must not be taken for those of the next.
            for worker in [worker for worker in self._workers if worker.place is not None]:
                self._replace(worker)

    def close(self) -> None:
        for worker in self._workers:
            worker.close_channel()
        for worker in self._workers:
            worker.end(END_SECONDS if worker.place is None else 0)
        self._workers = []
        self._lifeline.close()

    def _replace(self, worker: _Worker) -> _Worker:
        worker.close_channel()
        worker.end(0)
        self._workers.remove(worker)
        self._workers.append(self._start())
        return self._workers[-1]

    def _wait_until_ready(self, worker: _Worker) -> None:
        worker.channel.socket.settimeout(START_SECONDS)
        while (message := worker.channel.message()) is None:
            if not worker.channel.receive():
                raise ConfigError(f"a process of rewards {worker.ending()} while it imported {self._functions()}")
        self._check_ready(worker, message)

    def _check_ready(self, worker: _Worker, message: Mapping[str, Any]) -> None:
        if "error" in message:
            name = self._names[message["function"]]
            raise ConfigError(f"rewards.functions: {name}: {message['error']}")
        worker.ready = True

    def _functions(self) -> str:
        return ", ".join(self._names.values())


class _PoolRun:
    """Calls divided among the processes."""

    def __init__(self, pool: WorkerPool, calls: Sequence[Call], stop_at_failure: bool) -> None:
        self.pool, self.calls, self.stop_at_failure = pool, calls, stop_at_failure
        self.waiting = deque(range(len(calls)))
        self.results: list[Outcome | None] = [None] * len(calls)

    def outcomes(self) -> list[Outcome | None]:
        while self.waiting or any(worker.place is not None for worker in self.pool._workers):
            self._begin_calls()
            self._take_replies()
            self._end_late()
        return self.results

    def _begin_calls(self) -> None:
        for worker in [worker for worker in self.pool._workers if not worker.busy]:
            if not self.waiting:
                return
            place = self.waiting.popleft()
            try:
                worker.begin(place, self.calls[place], self.pool._seconds)
            except (OSError, EOFError):
                # It had ended between two calls, for instance by the kernel when memory ran out.
                self.waiting.appendleft(place)
                self.pool._replace(worker)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                reason = f"the samples cannot be sent to a process: {error}; set rewards.workers=0"
                self._settle(place, Failed(reason, wrong=True))

    def _take_replies(self) -> None:
        workers = [worker for worker in self.pool._workers if worker.busy]
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                selector.register(worker.channel.socket, selectors.EVENT_READ, worker)
            soonest = min((worker.deadline for worker in workers), default=time.monotonic())
            for key, _ in selector.select(max(soonest - time.monotonic(), 0)):
                self._take_reply(key.data)

    def _take_reply(self, worker: _Worker) -> None:
        if not worker.channel.receive():
            self._ended(worker)
        elif (message := worker.channel.message()) is not None:
            if worker.ready:
                place, worker.place = worker.place, None
                assert place is not None
                self._settle(place, _outcome(message))
            else:
                self.pool._check_ready(worker, message)

    def _ended(self, worker: _Worker) -> None:
        place, reason = worker.place, worker.ending()
        if place is None:
            raise ConfigError(f"a process of rewards {reason} while it imported {self.pool._functions()}")
        self.pool._replace(worker)
        self._settle(place, Failed(reason))

    def _end_late(self) -> None:
        now = time.monotonic()
        for worker in [worker for worker in self.pool._workers if worker.busy and worker.deadline <= now]:
            place = worker.place
            if place is None:
                seconds = f"{START_SECONDS:g} s"
                raise ConfigError(f"a process of rewards took longer than {seconds} to import {self.pool._functions()}")
            self.pool._replace(worker)
            seconds = f"{self.pool._seconds:g} s"
            self._settle(place, Failed(f"took longer than {seconds} (rewards.deadline_seconds) and was ended"))

    def _settle(self, place: int, outcome: Outcome) -> None:
        self.results[place] = outcome
        if self.stop_at_failure and isinstance(outcome, Failed):
            self.waiting.clear()


def _outcome(message: Mapping[str, Any]) -> Outcome:
    return Failed(**message) if "reason" in message else Judged(**message)


class _Worker:
    """One process. place: of the call that it is at; None where it is idle. deadline: of the call, or of the start."""

    def __init__(self, setup: Setup, lifeline: Lifeline) -> None:
        local, remote = socket.socketpair()
        self.channel = Channel(local)
        self.ready = False
        self.place: int | None = None
        self.deadline = time.monotonic() + START_SECONDS
        with remote:
            self._process = subprocess.Popen(
                [*COMMAND, str(remote.fileno()), str(lifeline.read_end)],
                stdin=subprocess.DEVNULL,
                pass_fds=(remote.fileno(), lifeline.read_end),
                # Threads of libraries: processes are what runs in parallel.
                env={"OMP_NUM_THREADS": "1", **os.environ},
                # A group of its own, by which children of functions are ended too, and interrupts do not reach it.
                start_new_session=True,
            )
        self.channel.send(setup)

    @property
    def busy(self) -> bool:
        return self.place is not None or not self.ready

    def begin(self, place: int, call: Call, seconds: float) -> None:
        """Raises OSError where the process has ended, and what pickle raises."""
        self.channel.socket.settimeout(seconds)
        self.channel.send(replace(call, environments=None))
        self.place, self.deadline = place, time.monotonic() + seconds

    def ending(self) -> str:
        """How the process ended, which has closed its channel."""
        if self.channel.is_too_long:
            return f"returned more than {LONGEST_REPLY >> 20} MiB"
        try:
            status = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its channel"
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended its process with status {status}"

    def close_channel(self) -> None:
        self.channel.close()

    def end(self, seconds: float) -> None:
        """Ends the process and those that it started, an idle one after it had the time to end by itself."""
        if seconds:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Lifeline:
    """A pipe whose end tells processes that this one has ended."""

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()

    def close(self) -> None:
        for descriptor in (self.read_end, self._write_end):
            os.close(descriptor)
