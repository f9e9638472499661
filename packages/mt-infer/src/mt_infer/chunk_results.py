"""What a forward pass gives for each of its chunks: next tokens, candidates of beams, log-probabilities of prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mt_infer.beams import beam_candidates
from mt_infer.cache.batch import Chunk
from mt_infer.isolation import run_isolated
from mt_infer.requests import DIVERGED, SAMPLING_FAILED, RunningSequence
from mt_infer.sampling.beam_search import Candidate
from mt_infer.sampling.sampler import NOT_FINITE, LogProbs, Sampled, log_probabilities
from mt_infer.speculation.drafter import verify


@dataclass
class ChunkResult:
    sampled: list[Sampled] = field(default_factory=list)
    """The next token, and those behind it whose drafts were right."""
    candidates: list[Candidate] = field(default_factory=list)
    """Candidates to continue a beam."""
    drafts: tuple[int, ...] = ()
    """Guesses of the tokens to come."""
    prompt: list[LogProbs | None] = field(default_factory=list)
    error: str | None = None
    """Why the sequence cannot be continued behind what was sampled."""


def results_from_logits(
    chunks: Sequence[Chunk], logits: Tensor, shares: Sequence[int] = (), *, alone: bool = True
) -> list[ChunkResult]:
    """logits [R, vocab]: the requested ones of each chunk, in their order. shares: see log_probabilities.

    An exception ends the sequence of its own chunk, with SAMPLING_FAILED. alone: whether no other rank computes the
    same; else one that other ranks may not have (memory) is raised, since they would go on with the sequence.
    """
    results = _Results(chunks, logits, shares, alone)
    results.run(results.score_prompts, range(len(chunks)))
    # Chunks behind which a token is sampled. Beams need scores of candidates in place of a token.
    ending = [number for number in results.valid() if chunks[number].is_last]
    results.run(results.find_candidates, [number for number in ending if chunks[number].sequence.beams is not None])
    others = [number for number in ending if chunks[number].sequence.beams is None]
    results.run(results.choose_tokens, others)
    for number in others:
        # One by one: matchers are advanced, which is not repeated.
        if results.results[number].error is None:
            results.run(results.follow_constraint, [number])
    return results.results


class _Results:
    """Each part fills in the results of some chunks, given by their numbers."""

    def __init__(self, chunks: Sequence[Chunk], logits: Tensor, shares: Sequence[int], alone: bool) -> None:
        self.chunks, self.shares, self.alone = chunks, shares, alone
        # [logits of the chunk, vocab] each; empty for chunks without.
        self.rows = logits.split([chunk.logits for chunk in chunks])
        self.results = [ChunkResult() for _ in chunks]

    def valid(self) -> list[int]:
        return [number for number, result in enumerate(self.results) if result.error is None]

    def run(self, part: Callable[[Sequence[int]], None], numbers: Sequence[int]) -> None:
        """Calls `part` with these chunks. One for which it raises has an error as its result."""
        for number in run_isolated(part, numbers, alone=self.alone, what="its next token was chosen"):
            self.results[number] = ChunkResult(error=SAMPLING_FAILED)

    def score_prompts(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.results[number].prompt = _prompt_logprobs(self.chunks[number], self.rows[number], self.shares)

    def find_candidates(self, numbers: Sequence[int]) -> None:
        last = torch.cat([self.rows[number][-1:] for number in numbers])  # [beams, vocab]
        candidates = beam_candidates(last, [self.chunks[number].sequence for number in numbers])
        for number, of_beam in zip(numbers, candidates, strict=True):
            matcher = self.chunks[number].sequence.matcher
            # Log-probabilities are nan together, and the largest is first.
            error = DIVERGED if math.isnan(of_beam[0][0]) else None if matcher is None else matcher.error
            self.results[number].candidates, self.results[number].error = of_beam, error

    def choose_tokens(self, numbers: Sequence[int]) -> None:
        # [sum of 1 + drafts, vocab]; rows of prompt_logprobs before these are left out.
        last = torch.cat([self.rows[number][-1 - len(self.chunks[number].drafts) :] for number in numbers])
        verified = verify(last, [self.chunks[number] for number in numbers], self.shares)
        for number, sampled in zip(numbers, verified, strict=True):
            self.results[number].sampled = sampled

    def follow_constraint(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            result = self.results[number]
            result.sampled, result.error = _continuation(self.chunks[number].sequence, result.sampled)


def _continuation(sequence: RunningSequence, sampled: list[Sampled]) -> tuple[list[Sampled], str | None]:
    """The next tokens, and what stops them."""
    # No draft equals NOT_FINITE, so that it can only be the last. Without tokens to generate none is reported.
    if sampled[-1].token != NOT_FINITE or sequence.request.sampling.max_tokens == 0:
        return _constrained(sequence, sampled)
    tokens, error = _constrained(sequence, sampled[:-1])
    return tokens, error or DIVERGED


def _constrained(sequence: RunningSequence, sampled: list[Sampled]) -> tuple[list[Sampled], str | None]:
    """Advances the sequence's matcher: the next tokens, up to the end of the constraint, and what stops them else.

    It is decided where tokens are sampled, since matchers elsewhere have not computed the same.
    """
    matcher = sequence.matcher
    if matcher is None:
        return sampled, None
    for place, next_token in enumerate(sampled):
        is_stop = next_token.token in sequence.stop_ids
        # A stop token is not text, and need not match.
        if not is_stop:
            matcher.advance(next_token.token)
        # The matcher failed at this token or before it, so that nothing ensures that the token matches.
        if (error := matcher.error) is not None:
            return sampled[:place], error
        # What is behind it was sampled for drafts beyond the end.
        if is_stop or matcher.is_complete:
            return [*sampled[:place], replace(next_token, is_end=True)], None
    return sampled, None


def _prompt_logprobs(chunk: Chunk, logits: Tensor, shares: Sequence[int]) -> list[LogProbs | None]:
    """Those of the prompt's tokens that follow the positions of the chunk's logits."""
    sequence, wanted = chunk.sequence, chunk.sequence.request.sampling.prompt_logprobs
    if wanted is None or chunk.start >= sequence.prompt_length:
        return []
    # Logits at position i are of token i + 1. The last position of the prompt has no token of the prompt behind it.
    following = sequence.tokens[chunk.first_logits + 1 : min(chunk.end + 1, sequence.prompt_length)]
    tokens = torch.tensor(following, dtype=torch.int64, device=logits.device)
    # An image token behind the vocabulary has no probability.
    vocab = logits.shape[-1]
    asked = [wanted if token < vocab else None for token in following]
    return log_probabilities(logits[: len(following)], tokens.clamp(max=vocab - 1), asked, shares)
