"""Beam search, as `transformers.generate` defines it: scores, and which beams go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Literal

from mt_infer.detokenizer import Detokenizer
from mt_infer.sampling.parameters import SamplingParameters

Candidate = tuple[float, int]
"""Log-probability, token."""


End = Literal["token", "text", "limit"]
"""A stop token, a stop text, or the number of tokens."""


@dataclass(frozen=True)
class Continuation:
    """score: sum of log-probabilities. parent: number of the beam that `token` continues. logprob: of the token."""

    score: float
    parent: int
    token: int
    logprob: float


@dataclass(frozen=True)
class ScoredToken:
    """A token of a beam: its log-probability as the search adds it, and the likeliest candidates in its place."""

    logprob: float
    likeliest: tuple[Candidate, ...]


@dataclass(frozen=True)
class Hypothesis:
    """A finished beam. tokens: generated ones, with the stop token or the stop text where it ended with one. scored: of
    each token, if sampling.logprobs requests it."""

    score: float
    tokens: tuple[int, ...]
    end: End
    scored: tuple[ScoredToken, ...] = ()


class BeamSearch:
    """The scores of one request's beams. limit: tokens that are generated at most. text: of no tokens, where beams end
    with stop texts."""

    def __init__(
        self, sampling: SamplingParameters, stop_ids: frozenset[int], limit: int, text: Detokenizer | None = None
    ) -> None:
        self.sampling, self.stop_ids, self.limit = sampling, stop_ids, limit
        self.scores = [0.0]
        self._texts = [text]
        self._scored: list[tuple[ScoredToken, ...]] = [()]
        """Both of the running beams."""
        self.finished: list[Hypothesis] = []
        """At most num_beams, the best first."""
        self.is_done = False

    @property
    def kept(self) -> int:
        """Candidates of a step: as many can end as there are stop tokens, and num_beams continue."""
        return max(2, 1 + len(self.stop_ids)) * self.sampling.num_beams

    @property
    def candidates(self) -> int:
        """Number of candidates of each beam: for the search, and to report the likeliest."""
        return max(self.kept, self.sampling.logprobs or 0)

    def advance(
        self, candidates: Sequence[Sequence[Candidate]], generated: Sequence[Sequence[int]]
    ) -> list[Continuation]:
        """Candidates and generated tokens of each beam -> the beams of the next step."""
        # nlargest is stable: of equal scores the earlier beam, and in it the likelier token, comes first.
        best = nlargest(self.kept, self._continuations(candidates), key=lambda continuation: continuation.score)
        # All running beams have the same length.
        length, beams = len(generated[0]) + 1, self.sampling.num_beams
        texts = [self._text(continuation) for continuation in best]
        scored = [self._with_token(continuation, candidates[continuation.parent]) for continuation in best]
        ends = [self._end(continuation, text, length) for continuation, text in zip(best, texts, strict=True)]
        # transformers' rule: a beam ends only if its end token is among the first num_beams candidates; one that is
        # lower is dropped, not finished.
        for continuation, scored_tokens, end in zip(best[:beams], scored, ends, strict=False):
            if end is not None:
                self._finish(continuation, generated[continuation.parent], scored_tokens, end)
        # At most one candidate of each beam ends for every stop token, so that num_beams of `kept` are left; ends by a
        # text can leave fewer.
        running = [place for place, end in enumerate(ends) if end is None][:beams]
        following = [best[place] for place in running]
        self.scores = [continuation.score for continuation in following]
        self._texts, self._scored = [texts[place] for place in running], [scored[place] for place in running]
        self.is_done = not following or self._is_final(length)
        return following

    def _continuations(self, candidates: Sequence[Sequence[Candidate]]) -> list[Continuation]:
        return [
            Continuation(score + logprob, parent, token, logprob)
            for parent, (score, following) in enumerate(zip(self.scores, candidates, strict=True))
            for logprob, token in following
            if logprob > float("-inf")
        ]

    def _with_token(self, continuation: Continuation, candidates: Sequence[Candidate]) -> tuple[ScoredToken, ...]:
        wanted = self.sampling.logprobs
        if wanted is None:
            return ()
        return (*self._scored[continuation.parent], ScoredToken(continuation.logprob, tuple(candidates[:wanted])))

    def _text(self, continuation: Continuation) -> Detokenizer | None:
        parent = self._texts[continuation.parent]
        if parent is None or continuation.token in self.stop_ids:
            return None
        text = parent.copy()
        text.add(continuation.token)
        return text

    def _end(self, continuation: Continuation, text: Detokenizer | None, length: int) -> End | None:
        if continuation.token in self.stop_ids:
            return "token"
        if text is not None and text.stopped_by is not None:
            return "text"
        return "limit" if length == self.limit else None

    def _finish(
        self, continuation: Continuation, before: Sequence[int], scored: tuple[ScoredToken, ...], end: End
    ) -> None:
        tokens = (*before, continuation.token)
        # The length counts generated tokens with the stop token, without the prompt, as in transformers.
        score = continuation.score / len(tokens) ** self.sampling.length_penalty
        self.finished.append(Hypothesis(score, tokens, end, scored))
        self.finished = nlargest(self.sampling.num_beams, self.finished, key=lambda done: done.score)

    def _is_final(self, length: int) -> bool:
        """Whether enough beams have finished, and no other can become better."""
        if len(self.finished) < self.sampling.num_beams:
            return False
        penalty = self.sampling.length_penalty
        # Scores are negative: with a positive penalty a longer text divides by more, so that the best that a beam can
        # still reach is at the longest length. early_stopping=False takes the present length, a heuristic of
        # transformers.
        to_the_end = self.sampling.early_stopping == "never" and penalty > 0
        best_possible = self.scores[0] / (self.limit if to_the_end else length) ** penalty
        return self.sampling.early_stopping is True or best_possible <= self.finished[-1].score
