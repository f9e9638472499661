"""Calls of reward functions in this process; those in worker processes are in `pool`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from mt_tune.rewards.calling import Call, LoadedFunction, Outcome, judge_together


class Caller(Protocol):
    """Makes calls of functions, by their numbers."""

    def run(self, calls: Sequence[Call], *, stop_at_failure: bool) -> list[Outcome | None]:
        """An outcome for each call. stop_at_failure: calls that have not begun when one fails are not made (None)."""
        ...

    def close(self) -> None: ...


class InProcess:
    """Calls in this process, one after another, async functions together. Nothing ends one that takes too long.

    functions: by their numbers.
    """

    def __init__(self, functions: dict[int, Callable[..., object]]) -> None:
        self._functions = {number: LoadedFunction(function) for number, function in functions.items()}

    def run(self, calls: Sequence[Call], *, stop_at_failure: bool) -> list[Outcome | None]:
        together = [call for call in calls if self._functions[call.function].is_async]
        awaited = iter(judge_together([(self._functions[call.function], call) for call in together]))
        return [
            next(awaited) if function.is_async else function.judge(call)
            for call in calls
            for function in (self._functions[call.function],)
        ]

    def close(self) -> None:
        return
