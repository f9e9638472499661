"""Phases of a run (such as a training step), each with a time limit."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from mt_core.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class PhaseTimeouts:
    """Time limits of the phases in seconds. Past a limit the run ends with an error that names the late rank."""

    init: float = 600.0
    """Rendezvous of all ranks and creation of the process groups."""
    data: float = 1800.0
    """Building data sets and waiting for a batch."""
    load: float = 3600.0
    step: float = 1800.0
    evaluate: float = 3600.0
    save: float = 3600.0

    def of(self, phase: str) -> float:
        """The limit of a phase. Raises ConfigError when there is no such phase."""
        try:
            return vars(self)[phase]
        except KeyError:
            names = list(vars(self))
            known = f"phases are {', '.join(names)}{did_you_mean(phase, names)}"
            raise ConfigError(f"there is no phase {phase!r}; {known}") from None

    @property
    def longest(self) -> float:
        return max(vars(self).values())


class Position(NamedTuple):
    """The phase and step of a rank. entered: number of phases entered; comparable over ranks of one program."""

    phase: str = "start"
    step: int | None = None
    entered: int = 0
    since: float = 0.0
    """By time.monotonic() of the rank's machine."""
    timeout: float | None = None

    def __str__(self) -> str:
        return f"phase {self.phase}" + ("" if self.step is None else f", step {self.step}")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def to_json(self) -> str:
        # Seconds in the phase and not `since`: monotonic clocks of different machines have different zeros.
        return json.dumps([self.phase, self.step, self.entered, self.seconds, self.timeout])

    @classmethod
    def from_json(cls, text: str | bytes) -> Position:
        """With `since` converted to this node's clock; the error is the time between writing and reading."""
        phase, step, entered, seconds, timeout = json.loads(text)
        return cls(phase, step, entered, time.monotonic() - seconds, timeout)


class Phases:
    """The position of this rank. Entering a phase sets one attribute; `Monitor` reads it from another thread.

    with phases("step", step=17): ...
    """

    def __init__(self, timeouts: PhaseTimeouts | None = None) -> None:
        self.timeouts = timeouts or PhaseTimeouts()
        self.position = Position(since=time.monotonic())

    def enter(self, phase: str, timeout: float | None = None, step: int | None = None) -> None:
        """Enter a phase, which lasts until the next. timeout: seconds, in place of the configured limit."""
        limit = self.timeouts.of(phase) if timeout is None else timeout
        before = self.position
        step = before.step if step is None else step
        # One assignment of an immutable tuple: the monitor thread reads the old or the new position, and no mixture.
        self.position = Position(phase, step, before.entered + 1, time.monotonic(), limit)

    @contextmanager
    def __call__(self, phase: str, timeout: float | None = None, step: int | None = None) -> Iterator[None]:
        """Context manager: a nested phase. Leaving it re-enters the outer phase and restarts its time; an exception
        keeps the inner phase, for the record."""
        outer = self.position
        self.enter(phase, timeout, step)
        yield
        self.position = outer._replace(
            step=self.position.step, entered=self.position.entered + 1, since=time.monotonic()
        )
