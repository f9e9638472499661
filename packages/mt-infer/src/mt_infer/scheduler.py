"""Which sequences a forward pass computes, and how many positions of each.

Every step computes the next position of all running sequences, and fills the rest of its budget with prompts, which may
take several steps (chunked prefill). When memory runs out, the sequence that came last gives up its memory and waits to
be computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from mt_core.errors import ConfigError
from mt_infer.cache.batch import Chunk
from mt_infer.cache.blocks import OutOfBlocksError
from mt_infer.cache.manager import CacheManager
from mt_infer.requests import RunningSequence


class Scheduler:
    """Sequences in order of arrival: running ones, and those that wait.

    The same calls give the same schedule: each rank of a layout has a scheduler of its own, and they agree.
    """

    def __init__(self, manager: CacheManager) -> None:
        self.manager = manager
        self.running: list[RunningSequence] = []
        self.waiting: deque[RunningSequence] = deque()
        self.preemptions = 0

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting

    def add(self, sequences: Iterable[RunningSequence]) -> None:
        self.waiting.extend(sequences)

    def remove(self, sequence: RunningSequence) -> None:
        """The sequence has ended, or is cancelled."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.manager.release(sequence)
        else:
            self.waiting.remove(sequence)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next forward pass; empty when there is nothing to do."""
        budget = self.manager.limits.step
        chunks: list[Chunk] = []
        for sequence in list(self.running):
            if sequence not in self.running:
                continue  # preempted for one that came before it
            count = self._reserve(sequence, min(sequence.waiting, budget), may_preempt=True)
            if count:
                chunks.append(self._chunk(sequence, count))
                budget -= count
        preempted = self.waiting and self.waiting[0].generated
        while self.waiting and budget and len(self.running) < self.manager.limits.max_requests:
            count = self._admit(self.waiting[0], budget)
            if not count:
                break
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            chunks.append(self._chunk(sequence, count))
            budget -= count
        if not chunks and not self.is_idle:
            raise ConfigError(
                "the cache does not hold one step of the only sequence; raise inference.cache_memory_gb"
                + (" (it was computed before)" if preempted else "")
            )
        return chunks

    def _chunk(self, sequence: RunningSequence, count: int) -> Chunk:
        ends = sequence.computed + count == len(sequence.tokens)
        asked = sequence.request.sampling.prompt_logprobs is not None and sequence.computed < sequence.prompt_length
        return Chunk(sequence, sequence.computed, count, count if asked else int(ends))

    def _admit(self, sequence: RunningSequence, budget: int) -> int:
        """Memory for the first chunk of a waiting sequence; 0 if there is none."""
        if self._awaits_prefix(sequence):
            return 0
        try:
            self.manager.admit(sequence)
            return self._reserve(sequence, min(sequence.waiting, budget), may_preempt=False)
        except OutOfBlocksError:
            self.manager.release(sequence)
            return 0

    def _awaits_prefix(self, sequence: RunningSequence) -> bool:
        """Whether another sequence of the same request computes the prompt that both have."""
        return self.manager.share_prefixes and any(
            other.request is sequence.request and other.computed < other.prompt_length for other in self.running
        )

    def _reserve(self, sequence: RunningSequence, count: int, *, may_preempt: bool) -> int:
        """Memory for `count` more positions, or for 0 if it was this sequence that had to give up its own.

        Raises OutOfBlocksError if it may not preempt.
        """
        if not count:
            return 0
        end = self.manager.chunk_end(sequence, sequence.computed + count)
        while True:
            try:
                self.manager.reserve(sequence, end)
                return end - sequence.computed
            except OutOfBlocksError:
                if not may_preempt:
                    raise
                last = self.running[-1]
                self._preempt(last)
                if last is sequence:
                    return 0

    def _preempt(self, sequence: RunningSequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self.manager.release(sequence)
        self.waiting.appendleft(sequence)

    def sequences(self) -> Iterator[RunningSequence]:
        yield from self.running
        yield from self.waiting
