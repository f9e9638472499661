"""Timeline of a pipeline step, measured or simulated, and its bubble."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mt_core.parallel.pipeline.schedule_tables import Action, Kind

COMPUTATION = frozenset((Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))


class Span(NamedTuple):
    """An action from `start` to `end`, in seconds (or any unit). For a receive, the wait."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of each rank, in order, on a common clock."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """From the start of the first computation to the end of the last, over all ranks."""
        spans = [span for rank in self.ranks for span in rank if span.action.kind in COMPUTATION]
        # Waits for inputs are not counted at either end: a receive that is posted early is no work.
        return max(span.end for span in spans) - min(span.start for span in spans) if spans else 0.0

    def busy(self, rank: int) -> float:
        """Compute time of a rank."""
        return sum(span.end - span.start for span in self.ranks[rank] if span.action.kind in COMPUTATION)

    @property
    def bubble_fraction(self) -> float:
        """Idle fraction of all ranks' time, from the first start to the last end."""
        whole = self.makespan * len(self.ranks)
        return 1.0 - sum(map(self.busy, range(len(self.ranks)))) / whole if whole else 0.0

    @property
    def bubble_ratio(self) -> float:
        """Idle over busy time, which is (p - 1) / m for GPipe and 1F1B of p even stages and m micro-batches."""
        # fraction = idle / (idle + busy), so this is idle / busy, the bubble of Narayanan et al. (2021).
        return self.bubble_fraction / (1.0 - self.bubble_fraction)
