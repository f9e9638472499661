"""What text generation reports: events as they come, and sequences that have ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from mt_core.errors import ConfigError
from mt_infer.requests import FinishReason, LogProbs


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
