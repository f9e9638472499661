"""The scheduler and the cache of the engine, driven by requests without a model: each token is chosen beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mt_infer.cache.batch import Chunk
from mt_infer.cache.layout import CacheGroup, CacheLayout, CacheLimits
from mt_infer.cache.manager import CacheManager
from mt_infer.new_requests import NewSequences
from mt_infer.requests import Request, RunningSequence
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.scheduler import Scheduler


@dataclass(frozen=True)
class Asked:
    """A request that arrives before step `arrival`: its prompt and the tokens that a model would generate."""

    name: str
    prompt: Sequence[int]
    generated: Sequence[int]
    arrival: int = 0


@dataclass
class Step:
    """What a forward pass computes. chunks: request -> (start, count); used: blocks in use after it."""

    chunks: dict[str, tuple[int, int]] = field(default_factory=dict)
    waiting: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    cached: dict[str, int] = field(default_factory=dict)
    used: int = 0


class Play:
    """An engine without a model. blocks: of the cache; budget: positions of a forward pass."""

    def __init__(self, blocks: int, block_size: int, budget: int, longest: int, max_requests: int = 8) -> None:
        # One byte a position, so that the memory is the number of places.
        layout = CacheLayout((CacheGroup(None, (), (), "auto", 1),), (), 0)
        limits = CacheLimits(blocks * block_size, block_size, max_requests, longest, budget)
        self.manager = CacheManager(layout, limits, torch.device("cpu"), share_prefixes=True)
        self.scheduler = Scheduler(self.manager)
        self.sequences: dict[str, RunningSequence] = {}
        self.asked: dict[str, Asked] = {}
        self.content: dict[int, list[int]] = {}
        """Tokens whose keys and values a block holds."""
        self._new = NewSequences(self.manager, None, longest)

    @property
    def pool(self):  # type: ignore[no-untyped-def]
        return self.manager.pools[0]

    def add(self, asked: Asked) -> None:
        sampling = SamplingParameters(seed=0, max_tokens=len(asked.generated))
        (sequence,) = self._new.of_request(Request(len(self.asked), tuple(asked.prompt), sampling))
        self.sequences[asked.name], self.asked[asked.name] = sequence, asked
        self.scheduler.add([sequence])

    def name_of(self, sequence: RunningSequence) -> str:
        return next(name for name, other in self.sequences.items() if other is sequence)

    def step(self) -> Step:
        """One forward pass, after which sequences that have all their tokens end."""
        before = set(self.scheduler.running)
        chunks = self.scheduler.schedule()
        running = tuple(self.name_of(sequence) for sequence in self.scheduler.running)
        waiting = tuple(self.name_of(sequence) for sequence in self.scheduler.waiting)
        lost = tuple(name for name in waiting if self.sequences[name] in before)
        cached = {self.name_of(c.sequence): c.sequence.cached for c in chunks if c.start == c.sequence.cached}
        step = Step({self.name_of(c.sequence): (c.start, c.count) for c in chunks}, waiting, running, lost, cached)
        for chunk in chunks:
            self._compute(chunk)
        step.used = self.manager.used_blocks
        for name in running:
            sequence, asked = self.sequences[name], self.asked[name]
            if len(sequence.tokens) == len(asked.prompt) + len(asked.generated):
                self.scheduler.remove(sequence)
        return step

    def _compute(self, chunk: Chunk) -> None:
        sequence, size = chunk.sequence, self.manager.limits.block_size
        self.manager.computed(sequence, chunk.end)
        for number, block in enumerate(sequence.tables[0].blocks):
            if block is not None:
                self.content[block] = sequence.tokens[number * size : min((number + 1) * size, chunk.end)]
        asked = self.asked[self.name_of(sequence)]
        if chunk.is_last:
            sequence.tokens.append(asked.generated[len(sequence.tokens) - len(asked.prompt)])

    def run(self, asked: Sequence[Asked], limit: int = 60) -> list[Step]:
        """Steps until all requests have ended."""
        steps: list[Step] = []
        while len(steps) < limit and (len(steps) <= max(one.arrival for one in asked) or not self.scheduler.is_idle):
            for one in asked:
                if one.arrival == len(steps):
                    self.add(one)
            steps.append(Step() if self.scheduler.is_idle else self.step())
        return steps
