"""The best of several sequences, by their mean log-probability."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mt_infer.completions import TextEvent
from mt_infer.sampling.parameters import SamplingParameters


class BestOf:
    """The events of a request for the best of several sequences, until all have ended."""

    def __init__(self, sampling: SamplingParameters) -> None:
        self.sampling = sampling
        # Log-probabilities are needed to rank, whether they are reported or not.
        self.generated = replace(sampling, logprobs=sampling.logprobs or 0)
        """What the engine is requested to do."""
        self._events: list[list[TextEvent]] = [[] for _ in range(sampling.sequences)]

    def add(self, event: TextEvent) -> list[TextEvent]:
        """The events of the chosen sequences, once all have ended. They are numbered anew, the best first."""
        self._events[event.index].append(event)
        # Which are the best is not known before, so that nothing can be streamed.
        if not all(events and events[-1].finish is not None for events in self._events):
            return []
        best = sorted(self._events, key=_rank, reverse=True)[: self.sampling.n]
        return [one for index, events in enumerate(best) for one in self._renumbered(events, index)]

    def _renumbered(self, events: Sequence[TextEvent], index: int) -> Iterator[TextEvent]:
        for event in events:
            logprobs = None if self.sampling.logprobs is None else event.logprobs
            score = mean_logprob(events) if event is events[-1] else None
            yield replace(event, index=index, logprobs=logprobs, score=score)


def _rank(events: Sequence[TextEvent]) -> tuple[bool, float]:
    """Sequences that could not be continued come last."""
    return events[-1].error is None, mean_logprob(events)


def mean_logprob(events: Sequence[TextEvent]) -> float:
    """Of the tokens; 0 for none."""
    found = [event.logprobs.token for event in events if event.logprobs is not None]
    return sum(found) / len(found) if found else 0.0
