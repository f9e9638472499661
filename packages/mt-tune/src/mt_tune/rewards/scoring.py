"""Reward functions of a run: called in batches, with failures traced to a sample."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mt_tune.rewards.base import RewardError, RewardSample, RewardTable, shown
from mt_tune.rewards.callers import Caller
from mt_tune.rewards.calling import Call, Failed, Judged, Outcome, columns_of

log = logging.getLogger(__name__)
SKIPPED_SHOWN = 5
"""Warnings of one `score` about samples that a function failed on."""


@dataclass(frozen=True)
class NamedReward:
    """A function of rewards.functions. samples_per_call: None for all. caller: what makes its calls."""

    name: str
    caller: Caller
    weight: float = 1.0
    samples_per_call: int | None = None


class RewardFunctions:
    """The functions of [rewards], ready to judge (`mt_tune.rewards.build.build_rewards`). Used as a context manager, or
    closed by `close`. skip_failures: rewards.on_failure="skip"."""

    def __init__(self, rewards: Sequence[NamedReward], *, skip_failures: bool = False) -> None:
        self.rewards, self.skip_failures = list(rewards), skip_failures
        self.names = [reward.name for reward in self.rewards]

    def score(
        self,
        samples: Sequence[RewardSample],
        step: int,
        *,
        max_steps: int | None = None,
        environments: Sequence[Any] | None = None,
    ) -> RewardTable:
        """The rewards of samples. step, max_steps: what functions read from `trainer_state`. environments: one for each
        sample, for functions that run in this process.

        Raises RewardError, which names the function, the sample and the reason.
        """
        return _Scoring(self, samples, step, max_steps, environments).table()

    def close(self) -> None:
        """Ends the processes."""
        for caller in self.callers():
            caller.close()

    def callers(self) -> list[Caller]:
        return list({id(reward.caller): reward.caller for reward in self.rewards}.values())

    def __enter__(self) -> RewardFunctions:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Part:
    """Samples of one call of a function, by their numbers."""

    function: int
    samples: Sequence[int]


@dataclass
class _Results:
    values: list[list[float | None]]
    failed: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, part: _Part, judged: Judged) -> None:
        for number, value in zip(part.samples, judged.values, strict=True):
            self.values[part.function][number] = value
        for name, logged in judged.metrics.items():
            self.metrics.setdefault(name, []).extend(logged)
        for name, entries in judged.columns.items():
            column = self.columns.setdefault(name, [None] * len(self.values[part.function]))
            for number, entry in zip(part.samples, entries, strict=True):
                column[number] = entry


@dataclass
class _Scoring:
    """One `score`."""

    functions: RewardFunctions
    samples: Sequence[RewardSample]
    step: int
    max_steps: int | None
    environments: Sequence[Any] | None

    def __post_init__(self) -> None:
        count = len(self.samples)
        self.results = _Results([[None] * count for _ in self.functions.rewards])

    def table(self) -> RewardTable:
        if self.samples:
            self._judge([part for number in range(len(self.functions.rewards)) for part in self._parts(number)])
        names, results = self.functions.names, self.results
        return RewardTable(
            values=dict(zip(names, results.values, strict=True)),
            weights=[reward.weight for reward in self.functions.rewards],
            logged={name: math.fsum(values) / len(values) for name, values in results.metrics.items()},
            columns=results.columns,
            failed=results.failed,
        )

    def _parts(self, number: int) -> Iterator[_Part]:
        count = len(self.samples)
        size = self.functions.rewards[number].samples_per_call or count
        return (_Part(number, range(start, min(start + size, count))) for start in range(0, count, size))

    def _judge(self, parts: list[_Part]) -> None:
        outcomes = self._outcomes(parts, stop_at_failure=not self.functions.skip_failures)
        failures = [(part, result) for part, result in zip(parts, outcomes, strict=True) if isinstance(result, Failed)]
        # First: those that end the run leave other calls without an outcome.
        for part, failed in failures:
            self._settle(part, failed)
        for part, outcome in zip(parts, outcomes, strict=True):
            if isinstance(outcome, Judged):
                self.results.add(part, outcome)

    def _outcomes(self, parts: Sequence[_Part], *, stop_at_failure: bool) -> list[Outcome | None]:
        """In the order of the parts."""
        outcomes: list[Outcome | None] = [None] * len(parts)
        for caller in self.functions.callers():
            places = [place for place, part in enumerate(parts) if self._reward(part).caller is caller]
            judged = caller.run([self._call(parts[place]) for place in places], stop_at_failure=stop_at_failure)
            for place, outcome in zip(places, judged, strict=True):
                outcomes[place] = outcome
        return outcomes

    def _call(self, part: _Part) -> Call:
        columns = columns_of([self.samples[number] for number in part.samples])
        chosen = None if self.environments is None else [self.environments[number] for number in part.samples]
        return Call(part.function, columns, self.step, self.max_steps, chosen)

    def _reward(self, part: _Part) -> NamedReward:
        return self.functions.rewards[part.function]

    # -- failures ------------------------------------------------------------------------------------

    def _settle(self, part: _Part, failed: Failed) -> None:
        """Raises RewardError for a failure, or leaves the samples out that it is about."""
        if failed.wrong:
            raise self._error(part, None if failed.sample is None else part.samples[failed.sample], failed.reason)
        at_fault = self._at_fault(part, failed)
        if not self.functions.skip_failures or not at_fault:
            first = next(iter(at_fault), None)
            raise self._error(part, first, at_fault.get(first, failed.reason) if first is not None else failed.reason)
        self._leave_out(part, at_fault)
        if rest := [number for number in part.samples if number not in at_fault]:
            # Again together: rewards may compare samples with each other.
            again = _Part(part.function, rest)
            outcome = self._outcomes([again], stop_at_failure=True)[0]
            if not isinstance(outcome, Judged):
                raise self._error(again, None, outcome.reason if outcome else failed.reason)
            self.results.add(again, outcome)

    def _at_fault(self, part: _Part, failed: Failed) -> Mapping[int, str]:
        """Samples on which the function fails when it is called with each alone, and how; without skip_failures the
        first ones alone."""
        if len(part.samples) == 1:
            return {part.samples[0]: failed.reason}
        singles = [_Part(part.function, [number]) for number in part.samples]
        outcomes = self._outcomes(singles, stop_at_failure=not self.functions.skip_failures)
        return {
            single.samples[0]: outcome.reason
            for single, outcome in zip(singles, outcomes, strict=True)
            if isinstance(outcome, Failed)
        }

    def _leave_out(self, part: _Part, at_fault: Mapping[int, str]) -> None:
        name = self._reward(part).name
        self.results.failed[name] = self.results.failed.get(name, 0) + len(at_fault)
        for number, reason in list(at_fault.items())[:SKIPPED_SHOWN]:
            log.warning("left out: %s", self._error(part, number, reason))

    def _error(self, part: _Part, number: int | None, reason: str) -> RewardError:
        name, samples = self._reward(part).name, part.samples
        if number is not None:
            return RewardError(name, number, reason, shown(self.samples[number]))
        return RewardError(name, None, reason, f"samples {samples[0]} to {samples[-1]} in one call")
