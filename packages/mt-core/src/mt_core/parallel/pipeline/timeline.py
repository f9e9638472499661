"""What ran when on each rank of a pipeline, measured or simulated, and how much of it was idle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mt_core.parallel.pipeline.orders import Action, Kind

COMPUTATION = frozenset((Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))


class Span(NamedTuple):
    """An action from `start` to `end`, in seconds (or any one unit). Of a receive, the waiting."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Of each rank its spans, in sequence; time counts from one moment for all."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """From the start of the first computation to the end of the last, over all ranks."""
        spans = [span for rank in self.ranks for span in rank if span.action.kind in COMPUTATION]
        return max(span.end for span in spans) - min(span.start for span in spans) if spans else 0.0

    def busy(self, rank: int) -> float:
        """Time that a rank computes."""
        return sum(span.end - span.start for span in self.ranks[rank] if span.action.kind in COMPUTATION)

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time, from first start to last end, in which they do not compute."""
        whole = self.makespan * len(self.ranks)
        return 1.0 - sum(map(self.busy, range(len(self.ranks)))) / whole if whole else 0.0

    @property
    def bubble_ratio(self) -> float:
        """Idle over busy time, which is (p - 1) / m for GPipe and 1F1B of p even stages and m micro-batches."""
        return self.bubble_fraction / (1.0 - self.bubble_fraction)
