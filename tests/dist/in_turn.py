"""Runs that tests look at one by one, computed several at a time in the same processes: a process and its first
training cost three times what each further training does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from mt_core.testing import RankFailureError, run_ranks

AT_ONCE = 14
"""Runs in the same processes: workers of pytest that share the tests of a file compute a group twice at most."""
SECONDS = 120.0
Run = tuple[int, Hashable]
"""The number of ranks, and what their function is called with."""
Call = tuple[Callable[..., Any], Any]
"""A function of (rank, world, case), and the case."""


class InTurn:
    """What `function(rank, world, case)` returns, computed once. Each list has processes of its own."""

    def __init__(self, function: Callable[..., Any], *lists: Iterable[Run]) -> None:
        self.function = function
        self.group_of = {run: group for runs in lists for group in groups(runs) for run in group}
        self.results_of_group = cache(self._results_of_group)

    def result(self, world: int, case: Hashable) -> Any:
        """Of the first rank."""
        return self.of_ranks(world, case)[0]

    def of_ranks(self, world: int, case: Hashable) -> list[Any]:
        """From the processes of its group, or from its own if it is in no list or if one of the group fails: no failure
        hides another."""
        run = world, case
        results = self.results_of_group(self.group_of[run]) if run in self.group_of else {}
        return results[run] if results else run_ranks(world, self.function, case)

    def _results_of_group(self, group: Sequence[Run]) -> dict[Run, list[Any]]:
        cases = [case for _, case in group]
        try:
            # All cases of the group in one launch: rank -> case -> result.
            of_ranks = run_ranks(group[0][0], one_after_another, self.function, cases, timeout=SECONDS)
        except (RankFailureError, TimeoutError) as error:
            warnings.warn(f"{len(group)} runs are repeated one by one, as together they failed: {error}", stacklevel=2)
            return {}
        # Transposed: case -> result of each rank.
        return {run: list(results) for run, *results in zip(group, *of_ranks, strict=True)}


def called(rank: int, world: int, call: Call) -> Any:
    """For runs that differ in their function too."""
    function, case = call
    return function(rank, world, case)


def groups(runs: Iterable[Run]) -> Iterator[tuple[Run, ...]]:
    """Runs on as many ranks, at most AT_ONCE together."""
    of_world: dict[int, list[Run]] = {}
    for run in dict.fromkeys(runs):
        of_world.setdefault(run[0], []).append(run)
    for same in of_world.values():
        yield from (tuple(same[start : start + AT_ONCE]) for start in range(0, len(same), AT_ONCE))


def one_after_another(rank: int, world: int, function: Callable[..., Any], cases: Sequence[Hashable]) -> list[Any]:
    return [function(rank, world, case) for case in cases]
