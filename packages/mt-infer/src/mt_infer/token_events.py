"""From a sampled token to the event that reports it, and whether the sequence ends with it."""

from __future__ import annotations

from dataclasses import replace

from mt_infer.requests import FinishReason, RunningSequence, TokenEvent
from mt_infer.sampling.sampler import Sampled


def append_sampled(sequence: RunningSequence, sampled: Sampled, longest: int) -> TokenEvent:
    """Adds a sampled token to its sequence. longest: positions of a sequence."""
    event = _event_of(sequence, sampled, longest)
    if event.token is None:
        return event
    sequence.tokens.append(event.token)
    return replace(event, finish=FinishReason.STOP) if sampled.is_end else event


def failed(request: int, index: int, error: str) -> TokenEvent:
    """The end of a sequence that cannot be continued."""
    return TokenEvent(request, index, None, finish=FinishReason.ERROR, error=error)


def _event_of(sequence: RunningSequence, sampled: Sampled, longest: int) -> TokenEvent:
    sampling, done = sequence.request.sampling, len(sequence.tokens) - sequence.prompt_length + 1
    finish: FinishReason | None = None
    token: int | None = sampled.token
    # The prompt was scored; a token was sampled with its last logits, and is dropped.
    if sampling.max_tokens == 0:
        token, finish = None, FinishReason.LENGTH
    elif sampled.token in sequence.stop_ids:
        token, finish = None, FinishReason.STOP
    # The token is reported with the end.
    elif done == sampling.max_tokens or sequence.prompt_length + done >= longest:
        finish = FinishReason.LENGTH
    prompt = None
    if sampling.prompt_logprobs is not None and done == 1:
        prompt = (None, *sequence.prompt_logprobs)
    logprobs = sampled.logprobs if token is not None else None
    return TokenEvent(sequence.request.id, sequence.index, token, logprobs, finish, prompt)
