"""Which sequences a forward pass computes, and how many positions of each.

Everything rests on two counters of a sequence: `len(tokens)`, its prompt and what was generated, and `computed`, the
leading positions that are in the cache. There is no phase of prefill or of decoding: a step computes positions of a
sequence from `computed` on, and a token is sampled where `computed` reaches `len(tokens)`. `num_uncomputed_tokens` is
the difference:

    a new prompt of 100 tokens     computed=0, 100 uncomputed; less where its prefix is in the cache
    a chunk of it was computed     computed=61, 39 uncomputed
    decoding                       1 uncomputed: the token that was sampled last
    after a preemption             computed=0 again, and the generated tokens are computed like a prompt

A step computes at most max_num_batched_tokens positions: those of running sequences first, then of waiting ones, whose
prompts may take several steps (chunked prefill). When memory runs out, the sequence that came last gives up its memory
and waits to be computed again. Requests with a lower number of `priority` come before others. The beams of a request
run together, or wait together.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from operator import attrgetter

from mt_core.errors import ConfigError
from mt_infer.blocks import OutOfBlocksError
from mt_infer.cache.batch import Chunk
from mt_infer.cache.manager import CacheManager
from mt_infer.requests import RunningSequence

PRIORITY = attrgetter("priority")


# Why decisions may not depend on time, on memory of the device or on sampled values that differ between ranks: ranks of
# a model run the same chunks in one forward pass, with collectives in it. All inputs (requests, tokens, sizes of pools)
# are the same on each of them, see mt_infer.cache.layout.
class Scheduler:
    """Sequences by priority, then in order of arrival: running ones, and those that wait.

    The same calls give the same schedule: each rank of a layout has a scheduler of its own, and they agree.
    """

    def __init__(self, manager: CacheManager) -> None:
        self.manager = manager
        self.running: list[RunningSequence] = []
        self.waiting: deque[RunningSequence] = deque()
        self.preemptions = 0
        self.queried_tokens = self.cached_tokens = 0
        """Tokens of admitted sequences that were looked up among prefixes, and those of them that were in the cache."""
        self._preempted: set[RunningSequence] = set()
        """In the present schedule."""

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting

    def add(self, sequences: Iterable[RunningSequence]) -> None:
        for sequence in sequences:
            insert_by_priority(self.waiting, sequence)

    def remove(self, sequence: RunningSequence) -> None:
        """The sequence has ended, or is cancelled."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.manager.release(sequence)
        else:
            self.waiting.remove(sequence)

    def replace(self, before: Sequence[RunningSequence], after: Sequence[RunningSequence]) -> None:
        """Running beams by those that continue them, in their place."""
        # Beams are neighbours in `running`, and all that comes before the first stays in order: preemption takes the
        # last ones.
        place = self.running.index(before[0])
        kept = [sequence for sequence in self.running if sequence not in before]
        self.running = [*kept[:place], *after, *kept[place:]]

    def schedule(self) -> list[Chunk]:
        """The chunks of the next forward pass; empty when there is nothing to do."""
        # 1. Running sequences, in their order: one position each where they decode, the next part of the prompt
        # else.
        budget = self.manager.limits.max_num_batched_tokens
        self._preempted.clear()
        chunks: list[Chunk] = []
        # A copy: _reserve preempts, which removes from `running`.
        for sequence in list(self.running):
            if sequence in self._preempted:
                continue  # for one that came before it
            count = self._reserve(sequence, min(sequence.num_uncomputed_tokens, budget))
            # 0: the budget is used up, or the sequence was preempted for its own next block.
            if count:
                chunks.append(self._with_drafts(self._chunk(sequence, count), budget - count))
                budget -= chunks[-1].count
        # A group of beams is preempted as a whole, so that some may have chunks already.
        chunks = [chunk for chunk in chunks if chunk.sequence not in self._preempted]
        # 2. New sequences, while there is budget and memory: with max_tokens_per_step=64 and 3 sequences that decode, a
        # new prompt of 100 tokens gets 61 positions in this step and 39 in the next. Strictly in order: a request that
        # does not fit keeps all behind it waiting, so that a large one is not overtaken forever.
        while self.waiting and budget and (admitted := self._admit(together(self.waiting[0]), budget)):
            for sequence in admitted:
                # They are the first of `waiting`, in this order: preempt() and NewSequences keep groups together.
                self.waiting.popleft()
                insert_by_priority(self.running, sequence)
                # May be 0 for later members of a group of beams; they then get their chunk in a next step, as running
                # sequences.
                count = self._within(sequence, budget)
                if count:
                    chunks.append(self._chunk(sequence, count))
                    budget -= count
        # Nothing else would free memory: without the error, step() would be called forever.
        if not chunks and not self.is_idle:
            raise ConfigError("the cache does not hold one step of the only request; raise inference.cache_memory_gb")
        return chunks

    def _chunk(self, sequence: RunningSequence, count: int) -> Chunk:
        start, end, first = sequence.computed, sequence.computed + count, sequence.first_logits
        # Logits of the last position, if the prompt ends in this chunk. With prompt_logprobs those of the prompt from
        # position `first` on; of positions that an earlier chunk computed they have been taken.
        logits = int(end == len(sequence.tokens))
        if first is not None and start < sequence.prompt_length:
            logits = max(logits, end - max(start, first))
        return Chunk(sequence, start, count, logits)

    def _with_drafts(self, chunk: Chunk, budget: int) -> Chunk:
        """With as many drafted tokens behind it as there is room for."""
        sequence = chunk.sequence
        # Drafts are good for one step: behind other tokens they guess something else.
        drafts, sequence.drafts = sequence.drafts[:budget], ()
        if not drafts or not chunk.is_last:
            return chunk
        try:
            self.manager.reserve(sequence, chunk.end + len(drafts))
        except OutOfBlocksError:
            # No other sequence loses its memory for guesses.
            return chunk
        # Logits behind the last token and behind each draft: 1 + len(drafts) tokens can come of the pass.
        return Chunk(sequence, chunk.start, chunk.count + len(drafts), 1 + len(drafts), drafts)

    def _admit(self, sequences: Sequence[RunningSequence], budget: int) -> Sequence[RunningSequence]:
        """Waiting sequences that run together, with memory for the first chunk of one, or all of several; none if there
        is no room."""
        taken = self._taken + self._wanted(sequences)
        # max_requests counts beams that a search will still add; else it would grow past the slots of recurrent states.
        if self._awaits_prefix(sequences[0]) or taken > self.manager.limits.max_requests:
            return []
        try:
            for sequence in sequences:
                self.manager.admit(sequence)
                # Preempted beams are admitted with memory for all of their positions: the search goes on only when its
                # last member has logits.
                alone = len(sequences) == 1
                count = self._within(sequence, budget) if alone else sequence.num_uncomputed_tokens
                self.manager.reserve(sequence, sequence.computed + count)
        except OutOfBlocksError:
            # All of them, also those that were not reached: release() of a sequence without memory frees nothing.
            for sequence in sequences:
                self.manager.release(sequence)
            return []
        # Counted after the sequence was admitted, so that attempts that fail do not count twice.
        if self.manager.share_prefixes:
            self.queried_tokens += sum(len(sequence.tokens) for sequence in sequences)
            self.cached_tokens += sum(sequence.cached for sequence in sequences)
        return sequences

    @property
    def _taken(self) -> int:
        """Running sequences, with the beams that they are going to be."""
        # Each group once, by its first member.
        groups = [
            sequence.beams
            for sequence in self.running
            if sequence.beams is not None and sequence is sequence.beams.members[0]
        ]
        return len(self.running) + sum(beams.missing for beams in groups)

    def _wanted(self, sequences: Sequence[RunningSequence]) -> int:
        beams = sequences[0].beams
        return len(sequences) + (beams.missing if beams is not None else 0)

    def _awaits_prefix(self, sequence: RunningSequence) -> bool:
        """Whether another sequence of the same request computes the prompt that both have."""
        # n samples of one prompt: the first computes it, the others find it in the cache, in place of computing it n
        # times.
        return self.manager.share_prefixes and any(
            other.request is sequence.request and other.computed < other.prompt_length for other in self.running
        )

    def _within(self, sequence: RunningSequence, budget: int) -> int:
        """Positions of the next chunk."""
        end = self.manager.chunk_end(sequence, sequence.computed + min(sequence.num_uncomputed_tokens, budget))
        return end - sequence.computed

    def _reserve(self, sequence: RunningSequence, count: int) -> int:
        """Memory for `count` more positions, or for 0 if it was this sequence that had to give up its own."""
        if not count:
            return 0
        end = self.manager.chunk_end(sequence, sequence.computed + count)
        while True:
            try:
                self.manager.reserve(sequence, end)
                return end - sequence.computed
            except OutOfBlocksError:
                # The last one in order, which may be this one. Each turn removes one at least from `running`, so that
                # the loop ends, and the first one in order is the last to be preempted.
                self.preempt(self.running[-1])
                if sequence in self._preempted:
                    return 0

    def preempt(self, sequence: RunningSequence) -> None:
        """The sequence, or all beams of its request, give up their memory and wait."""
        if sequence.beams is not None:
            # Candidates of members that this step has computed would be mixed with those of a later step.
            sequence.beams.candidates.clear()
        # Reversed, each before others of its priority: they wait in their order, before those that have not started.
        for member in reversed(together(sequence)):
            self.preemptions += 1
            self._preempted.add(member)
            self.running.remove(member)
            self.manager.release(member)
            # Frees the tensors (an encoder's output); _condition makes them again after admission.
            member.conditioning = None
            self.waiting.insert(bisect_left(self.waiting, member.priority, key=PRIORITY), member)

    def sequences(self) -> Iterator[RunningSequence]:
        yield from self.running
        yield from self.waiting


def insert_by_priority(sequences: MutableSequence[RunningSequence], sequence: RunningSequence) -> None:
    """Behind all others of the same priority."""
    # Usually all have the same: no search.
    if not sequences or sequences[-1].priority <= sequence.priority:
        sequences.append(sequence)
    else:
        sequences.insert(bisect_right(sequences, sequence.priority, key=PRIORITY), sequence)


def together(sequence: RunningSequence) -> Sequence[RunningSequence]:
    """The sequences that run, or wait, with it: beams of one request."""
    return list(sequence.beams.members) if sequence.beams is not None else [sequence]
