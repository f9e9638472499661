"""`Run`: what a directory or a log says about a training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Steps = NDArray[np.int64]
Values = NDArray[np.float64]
RECENT = 20
"""Lines of the log from which the speed is taken."""


@dataclass(frozen=True)
class Series:
    """A quantity over steps. steps: [n], strictly increasing. values: [n], NaN where a step has none."""

    steps: Steps
    values: Values

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float | None:
        """The last finite value."""
        finite = np.flatnonzero(np.isfinite(self.values))
        return float(self.values[finite[-1]]) if len(finite) else None

    @property
    def smallest(self) -> tuple[int, float] | None:
        """Step and value of the smallest finite value."""
        finite = np.isfinite(self.values)
        if not finite.any():
            return None
        place = int(np.argmin(np.where(finite, self.values, np.inf)))
        return int(self.steps[place]), float(self.values[place])


@dataclass
class Run:
    """series: by mt's names of metrics. axes: what a step corresponds to: `samples`, `tokens`, and `time`, the seconds
    of training without the time between two processes. config: `section.key` -> value. origins: of these.

    What a source does not have is empty; `missing` says what that is.
    """

    name: str
    path: Path
    source: str
    """Who wrote it: mt, Megatron-LM, torchtitan, transformers, TensorBoard."""
    series: dict[str, Series] = field(default_factory=dict)
    axes: dict[str, Series] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()
    status: Sequence[Mapping[str, Any]] = ()
    """What each rank did last, in their order."""
    experts: Mapping[int, Mapping[int, Sequence[float]]] = field(default_factory=dict)
    """Layer -> step -> load of each expert in percent of the mean."""
    missing: Sequence[str] = ()

    @property
    def last_step(self) -> int:
        return max((int(series.steps[-1]) for series in self.series.values() if len(series)), default=0)

    @property
    def seconds_per_step(self) -> float | None:
        """Over the last lines of the log, with what is between steps: evaluations and saves."""
        clock = self.axes.get("time")
        if clock is None or len(clock) < 2:
            return None
        steps, values = clock.steps[-RECENT:], clock.values[-RECENT:]
        return float((values[-1] - values[0]) / (steps[-1] - steps[0]))

    @property
    def resumes(self) -> list[int]:
        """Steps at which a process continued the run."""
        return [int(entry["iteration"]) for entry in self.events if entry["kind"] == "start" and entry["iteration"] > 0]

    @property
    def planned_memory(self) -> Mapping[int, int]:
        """Bytes that were planned, by pipeline rank; {} where none were."""
        plans = [entry for entry in self.events if entry["kind"] == "memory_plan"]
        return {int(pp): int(rank["total"]) for plan in plans[-1:] for rank in plan["ranks"] for pp in rank["pp_ranks"]}

    def samples(self) -> list[Mapping[str, Any]]:
        """Texts generated while training."""
        return [entry for entry in self.events if entry["kind"] == "sample"]
