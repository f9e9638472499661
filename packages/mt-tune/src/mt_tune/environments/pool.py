"""Processes that hold dialogues, each one at a time, and are ended when they exceed a deadline."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from mt_core.errors import ConfigError
from mt_tune.environments.process import Dialogues, ProcessSetup
from mt_tune.environments.setup import SourceSetup
from mt_tune.rewards.channels import Channel
from mt_tune.rewards.pool import END_SECONDS, START_SECONDS, Lifeline

COMMAND = (sys.executable, "-m", "mt_tune.environments.process")
Answer = Mapping[str, Any]
"""What `mt_tune.environments.process.Dialogues.answered` returns."""


class DialogueSeat(Protocol):
    """Where one dialogue at a time is held."""

    def ask(self, request: Mapping[str, Any]) -> None:
        """Sends a request of `mt_tune.environments.process.Dialogues`; its answer comes by `poll` of the pool."""
        ...


class DialoguePool(Protocol):
    def take(self) -> DialogueSeat | None:
        """A seat; None while all are taken."""
        ...

    def give_back(self, seat: DialogueSeat) -> None: ...

    def poll(self, *, wait: bool) -> list[tuple[DialogueSeat, Answer]]:
        """Answers that have arrived; wait: at least one, where a seat was asked."""
        ...

    def close(self) -> None: ...


class DialoguesHere:
    """Implements DialoguePool in this process, with as many dialogues as are wanted. Nothing ends one that takes too
    long."""

    def __init__(self, setup: SourceSetup) -> None:
        self._source = setup.load()
        self._free: list[_SeatHere] = []
        self._answers: list[tuple[DialogueSeat, Answer]] = []

    def take(self) -> DialogueSeat:
        return self._free.pop() if self._free else _SeatHere(Dialogues(self._source), self._answers)

    def give_back(self, seat: DialogueSeat) -> None:
        assert isinstance(seat, _SeatHere)
        self._free.append(seat)

    def poll(self, *, wait: bool) -> list[tuple[DialogueSeat, Answer]]:
        answers = list(self._answers)
        self._answers.clear()
        return answers

    def close(self) -> None:
        self._source.close()


class _SeatHere:
    def __init__(self, dialogues: Dialogues, answers: list[tuple[DialogueSeat, Answer]]) -> None:
        self._dialogues, self._answers = dialogues, answers

    def ask(self, request: Mapping[str, Any]) -> None:
        self._answers.append((self, self._dialogues.answered(request)))


class DialogueProcesses:
    """Implements DialoguePool by processes, which are forked from one that has imported the code.

    most: processes at a time. Raises ConfigError for code that cannot be imported.
    """

    def __init__(self, setup: SourceSetup, *, most: int, deadline_seconds: float, memory_mb: int) -> None:
        self._most, self._seconds = most, deadline_seconds
        self._lifeline = Lifeline()
        self._control, remote = socket.socketpair()
        with remote:
            self._forks = subprocess.Popen(
                [*COMMAND, str(remote.fileno()), str(self._lifeline.read_end)],
                stdin=subprocess.DEVNULL,
                pass_fds=(remote.fileno(), self._lifeline.read_end),
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,
            )
        self._free: list[_ProcessSeat] = []
        self._taken: list[_ProcessSeat] = []
        try:
            self._import(ProcessSetup(setup, list(sys.path), memory_mb))
        except BaseException:
            self.close()
            raise

    def _import(self, setup: ProcessSetup) -> None:
        control = Channel(self._control)
        control.send(setup)
        answer = _first_message(control, "the process of environments ended while it imported their code")
        if "error" in answer:
            raise ConfigError(f"rl.environments, rl.tools: {answer['error']}")

    def take(self) -> DialogueSeat | None:
        if not self._free:
            if len(self._taken) >= self._most:
                return None
            self._free.append(self._forked())
        seat = self._free.pop()
        self._taken.append(seat)
        return seat

    def give_back(self, seat: DialogueSeat) -> None:
        assert isinstance(seat, _ProcessSeat)
        self._taken.remove(seat)
        if not seat.has_ended:
            self._free.append(seat)

    def poll(self, *, wait: bool) -> list[tuple[DialogueSeat, Answer]]:
        answers: list[tuple[DialogueSeat, Answer]] = []
        while asked := [seat for seat in self._taken if seat.deadline is not None]:
            arrived = _readable(asked, wait)
            for seat in asked:
                if (answer := self._answer(seat, seat in arrived)) is not None:
                    answers.append((seat, answer))
            # Without one, a part of a message has arrived.
            if answers or not wait:
                break
        return answers

    def _answer(self, seat: _ProcessSeat, has_arrived: bool) -> Answer | None:
        assert seat.deadline is not None
        if has_arrived and not seat.channel.receive():
            seat.end()
            return {"error": "its process ended"}
        if (message := seat.channel.message()) is not None:
            seat.deadline = None
            answer: Answer = message
            return answer
        if seat.deadline > time.monotonic():
            return None
        seat.end()
        return {"error": f"took longer than {self._seconds:g} s (rl.environment_deadline_seconds) and was ended"}

    def _forked(self) -> _ProcessSeat:
        local, remote = socket.socketpair()
        with remote:
            socket.send_fds(self._control, [b"."], [remote.fileno()])
        return _ProcessSeat(Channel(local), self._seconds)

    def close(self) -> None:
        """Ends all processes, those that have nothing to do first by their channels."""
        for seat in [*self._free, *self._taken]:
            seat.end()
        self._free, self._taken = [], []
        self._control.close()
        try:
            self._forks.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._forks.kill()
            self._forks.wait()
        self._lifeline.close()


class _ProcessSeat:
    """One process. deadline: of the request that it is at; None where it is at none."""

    def __init__(self, channel: Channel, seconds: float) -> None:
        self.channel, self._seconds = channel, seconds
        self.deadline: float | None = None
        self.has_ended = False
        self._process = int(_first_message(channel, "a process of an environment could not be forked")["process"])

    def ask(self, request: Mapping[str, Any]) -> None:
        self.deadline = time.monotonic() + self._seconds
        # A process that has ended is noticed where its answer is read.
        with suppress(OSError):
            self.channel.socket.settimeout(self._seconds)
            self.channel.send(request)

    def end(self) -> None:
        """Ends the process and those that it started."""
        self.has_ended, self.deadline = True, None
        with suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)
        self.channel.close()


def _readable(seats: Sequence[_ProcessSeat], wait: bool) -> set[_ProcessSeat]:
    """Those that bytes have arrived from; wait: up to the soonest deadline."""
    soonest = min(seat.deadline or 0.0 for seat in seats)
    with selectors.DefaultSelector() as selector:
        for seat in seats:
            selector.register(seat.channel.socket, selectors.EVENT_READ, seat)
        return {key.data for key, _ in selector.select(max(soonest - time.monotonic(), 0) if wait else 0)}


def _first_message(channel: Channel, otherwise: str) -> Any:
    """Raises ConfigError where the process ends before its first message."""
    channel.socket.settimeout(START_SECONDS)
    while (message := channel.message()) is None:
        if not channel.receive():
            raise ConfigError(otherwise)
    return message
