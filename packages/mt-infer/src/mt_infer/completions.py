"""What text generation reports: events as they come, sequences that have ended, and the best of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from mt_core.errors import ConfigError
from mt_infer.requests import FinishReason
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.sampling.sampler import LogProbs


@dataclass(frozen=True)
class TextEvent:
    """What is new in one sequence: text that is final, and the token that brought it. See TokenEvent."""

    request: int
    index: int
    text: str
    token: int | None = None
    logprobs: LogProbs | None = None
    finish: FinishReason | None = None
    prompt_logprobs: tuple[LogProbs | None, ...] | None = None
    score: float | None = None
    error: str | None = None


@dataclass
class Completion:
    """One sequence of a request: its text without the prompt, and its tokens.

    score: of a beam, see TokenEvent; of a sequence that is among the best of several, its mean log-probability.
    error: why it could not be continued, with FinishReason.ERROR.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[LogProbs] = field(default_factory=list)
    finish: FinishReason | None = None
    prompt_logprobs: tuple[LogProbs | None, ...] | None = None
    score: float | None = None
    error: str | None = None

    def require_complete(self) -> Completion:
        """Itself. Raises ConfigError for one that could not be continued."""
        if self.error is not None:
            raise ConfigError(self.error)
        return self

    def add(self, event: TextEvent) -> None:
        self.text += event.text
        if event.token is not None:
            self.tokens.append(event.token)
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        self.finish = event.finish or self.finish
        self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
        self.score = self.score if event.score is None else event.score
        self.error = event.error or self.error


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
        return [renumbered for index, events in enumerate(best) for renumbered in self._renumbered(events, index)]

    def _renumbered(self, events: Sequence[TextEvent], index: int) -> Iterator[TextEvent]:
        for event in events:
            logprobs = None if self.sampling.logprobs is None else event.logprobs
            score = mean_logprob(events) if event is events[-1] else None
            yield replace(event, index=index, logprobs=logprobs, score=score)


def _rank(events: Sequence[TextEvent]) -> tuple[bool, float]:
    """Sequences that could not be continued come last."""
    return events[-1].error is None, mean_logprob(events)


def mean_logprob(events: Sequence[TextEvent]) -> float:
    """Mean over the tokens; 0 for none."""
    logprobs = [event.logprobs.token for event in events if event.logprobs is not None]
    return sum(logprobs) / len(logprobs) if logprobs else 0.0
