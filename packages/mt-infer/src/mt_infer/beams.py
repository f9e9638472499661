"""The running beams of a request: sequences whose cache blocks are shared as far as they are alike."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

from torch import Tensor

from mt_infer.blocks import OutOfBlocksError
from mt_infer.cache.manager import CacheManager
from mt_infer.requests import SAMPLING_FAILED, BeamGroup, FinishReason, RunningSequence, TokenEvent, failed
from mt_infer.sampling.beam_search import Candidate, Continuation, Hypothesis, ScoredToken
from mt_infer.sampling.constraints import Matcher
from mt_infer.sampling.rows import SamplingRow
from mt_infer.sampling.sampler import LogProbs, adjusted
from mt_infer.scheduler import Scheduler

log = logging.getLogger(__name__)


def beam_candidates(logits: Tensor, sequences: Sequence[RunningSequence]) -> list[list[Candidate]]:
    """logits [B, vocab] behind each beam -> its likeliest next tokens.

    Penalties and the like change log-probabilities, as in transformers.
    """
    # On log-probabilities, as in transformers: scores with penalties are not normalized again.
    scores = adjusted(logits.log_softmax(dim=-1), [SamplingRow(sequence) for sequence in sequences])
    return [_likeliest(row, sequence) for row, sequence in zip(scores, sequences, strict=True)]


def _likeliest(scores: Tensor, sequence: RunningSequence) -> list[Candidate]:
    assert sequence.beams is not None
    top = scores.topk(min(sequence.beams.search.candidates, scores.shape[-1]))
    return list(zip(top.values.tolist(), top.indices.tolist(), strict=True))


def advance_beams(group: BeamGroup, scheduler: Scheduler) -> list[TokenEvent]:
    """The next step of beams whose candidates are all known, or their end where one cannot be continued. Events come
    with the end of the search."""
    following = [] if group.error is not None else _following(group)
    if group.error is not None:
        request = group.members[0].request
        _remove(group, scheduler)
        return [failed(request.id, index, group.error) for index in range(request.sampling.n)]
    if not group.search.is_done:
        _continue(group, following, scheduler)
        return []
    _remove(group, scheduler)
    return list(_events(group))


def _following(group: BeamGroup) -> list[tuple[Continuation, Matcher | None]]:
    """For each beam of the next step its parent and its token, and its matcher behind that token. An exception ends the
    search, before any memory has changed hands."""
    candidates = [group.candidates[member] for member in group.members]
    group.candidates.clear()
    try:
        following = group.search.advance(candidates, [member.generated for member in group.members])
        return [
            (continuation, _advanced(group.members[continuation.parent].matcher, continuation.token))
            for continuation in following
        ]
    except Exception:
        log.exception("a beam search failed")
        group.error = SAMPLING_FAILED
        return []


def _advanced(matcher: Matcher | None, token: int) -> Matcher | None:
    """A copy behind the token."""
    if matcher is None:
        return None
    copy = matcher.copy()
    copy.advance(token)
    return copy


def _remove(group: BeamGroup, scheduler: Scheduler) -> None:
    for member in group.members:
        scheduler.remove(member)


def _continue(group: BeamGroup, following: Sequence[tuple[Continuation, Matcher | None]], scheduler: Scheduler) -> None:
    before, continuations = group.members, [continuation for continuation, _ in following]
    # Example, beams A B C; A is continued twice, C once: B is released, A continues itself, a fork of A is the second,
    # C the third.
    going_on = {continuation.parent for continuation in continuations}
    for number, member in enumerate(before):
        # Before forks, which may need the blocks.
        if number not in going_on:
            scheduler.manager.release(member)
    group.members, has_memory = _children(before, continuations, scheduler.manager)
    scheduler.replace(before, group.members)
    for member, (continuation, matcher) in zip(group.members, following, strict=True):
        # After all forks: a fork copies its parent's tokens without the new one.
        member.tokens.append(continuation.token)
        member.matcher = matcher
    # A beam without memory cannot run: the group waits as a whole, and is computed again with its new tokens.
    if not has_memory:
        scheduler.preempt(group.members[0])


def _children(
    before: Sequence[RunningSequence], following: Sequence[Continuation], manager: CacheManager
) -> tuple[list[RunningSequence], bool]:
    """The sequences that are continued: of each parent first itself, then copies. False: there was no room for some."""
    children: list[RunningSequence] = []
    has_memory = True
    for continuation in following:
        parent = before[continuation.parent]
        if parent not in children:
            children.append(parent)
            continue
        # A sequence with a copy of all that later steps write; conditioning and the search are shared.
        copy = copy_of(parent, manager)
        try:
            manager.fork(parent, copy)
        except OutOfBlocksError:
            # Not at once: the other members are to be complete before they wait.
            has_memory = False
        children.append(copy)
    return children, has_memory


def copy_of(parent: RunningSequence, manager: CacheManager) -> RunningSequence:
    """The same tokens, without memory in the cache."""
    return replace(
        parent,
        tables=manager.new_tables(),
        keys=parent.keys.copy(),
        tokens=list(parent.tokens),
        computed=0,
        slot=None,
        memory=dict(parent.memory),
    )


def _events(group: BeamGroup) -> Iterator[TokenEvent]:
    first = group.members[0]
    request = first.request
    prompt = None if request.sampling.prompt_logprobs is None else (None, *first.prompt_logprobs)
    best = group.search.finished[: request.sampling.n]
    for index, (_, done) in enumerate(zip_longest(range(request.sampling.n), best)):
        if done is None:  # a constraint leaves fewer beams than requested
            yield TokenEvent(request.id, index, None, finish=FinishReason.CANCELLED)
        else:
            events = list(_events_of(request.id, index, done))
            yield replace(events[0], prompt_logprobs=prompt)
            yield from events[1:]


def _events_of(request: int, index: int, done: Hypothesis) -> Iterator[TokenEvent]:
    # All but the last token are plain events; the last one carries the end and the score.
    *tokens, last = done.tokens
    every: list[LogProbs | None] = [_logprobs(scored_token) for scored_token in done.scored]
    *logprobs, last_logprobs = every or [None] * len(done.tokens)
    yield from (TokenEvent(request, index, *token) for token in zip(tokens, logprobs, strict=True))
    finish = FinishReason.LENGTH if done.end == "limit" else FinishReason.STOP
    # A stop token is not shown.
    if done.end == "token":
        yield TokenEvent(request, index, None, finish=finish, score=done.score)
    else:
        yield TokenEvent(request, index, last, last_logprobs, finish, score=done.score)


def _logprobs(scored: ScoredToken) -> LogProbs:
    return LogProbs(scored.logprob, tuple((token, logprob) for logprob, token in scored.likeliest))
