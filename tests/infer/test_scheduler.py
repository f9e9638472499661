"""Rules of the scheduler and of the block tables over random requests, without a model.

What a layer would have written at a place of the cache is represented by the tokens up to its position.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from mt_infer.cache.batch import Chunk
from mt_infer.cache.layout import CacheGroup, CacheLayout, CacheLimits
from mt_infer.cache.manager import CacheManager
from mt_infer.new_requests import NewSequences
from mt_infer.requests import Request, RunningSequence
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.scheduler import Scheduler

LONGEST, BLOCK, BUDGET, RUNNING = 24, 2, 7, 4
ROOT = (7, 3, 9, 9, 2, 5, 5, 1, 8, 4)
"""What many prompts begin with."""
WINDOWS = {"full": (None,), "window": (5,), "full and window": (None, 5)}


class Simulation:
    """Sequences under a scheduler. Each rule is checked in every step.

    positions: that the memory holds, beyond one sequence of the longest length.
    """

    def __init__(self, windows: tuple[int | None, ...], positions: int) -> None:
        groups = tuple(CacheGroup(window, (), (), "auto", 1) for window in windows)
        limits = CacheLimits(2**20, BLOCK, RUNNING, LONGEST, BUDGET)
        least = sum(min(LONGEST, (window or LONGEST) + BUDGET + BLOCK) + BLOCK for window in windows)
        limits = CacheLimits(least + positions * len(windows), BLOCK, RUNNING, LONGEST, BUDGET)
        self.manager = CacheManager(CacheLayout(groups, (), 0), limits, torch.device("cpu"), share_prefixes=True)
        self.scheduler = Scheduler(self.manager)
        self.new_sequences = NewSequences(self.manager, None, LONGEST)
        self.windows = windows
        self.written: list[dict[int, tuple[int, ...]]] = [{} for _ in windows]
        """Of each group: place -> the tokens on which its content depends."""
        self.ended: dict[RunningSequence, list[int]] = {}
        self.steps = self.positions = 0

    def add(self, number: int, prompt: tuple[int, ...], tokens: int, priority: int = 0, n: int = 1) -> None:
        sampling = SamplingParameters(max_tokens=tokens, priority=priority, n=n, seed=number)
        self.scheduler.add(self.new_sequences.of_request(Request(number, prompt, sampling)))

    def step(self) -> None:
        first = next(iter(self.scheduler.sequences()))
        chunks = self.scheduler.schedule()
        self.steps += 1
        assert sum(chunk.count for chunk in chunks) <= BUDGET, "more positions than max_num_batched_tokens"
        assert len(self.scheduler.running) <= RUNNING, "more sequences than max_requests"
        assert len({chunk.sequence for chunk in chunks}) == len(chunks), "two chunks of a sequence"
        assert chunks[0].sequence is first, "the first sequence waits for another"
        self.check_blocks()
        # By priority, then in order of arrival, also where some have been preempted.
        for sequences in (self.scheduler.running, self.scheduler.waiting):
            order = [(one.priority, one.request.id, one.index) for one in sequences]
            assert order == sorted(order), "not by priority and arrival"
        for chunk in chunks:
            self.compute(chunk)
        self.check_blocks()

    def check_blocks(self) -> None:
        """A block has as many users as tables list it; those that wait have none, and nothing is computed of them."""
        assert not any(table.blocks for one in self.scheduler.waiting for table in one.tables), "waiting with blocks"
        assert not any(one.computed for one in self.scheduler.waiting), "waiting with computed positions"
        for number, pool in enumerate(self.manager.pools):
            listed = Counter(
                block for one in self.scheduler.running for block in one.tables[number].blocks if block is not None
            )
            users = {block: users for block, users in enumerate(pool._users) if users}
            assert users == dict(listed), "a block has other users than the tables that list it"
            assert pool.free == pool.count - len(listed), "a block in use is free, or one without users is not"

    def compute(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        assert chunk.start == sequence.computed, "a chunk does not begin at `computed`"
        assert 1 <= chunk.count <= len(sequence.tokens) - chunk.start, "a chunk without uncomputed tokens"
        end = chunk.start + chunk.count
        for table, written, window in zip(sequence.tables, self.written, self.windows, strict=True):
            for position in range(chunk.start, end):
                written[table.place(position)] = tuple(sequence.tokens[: position + 1])
            # What the first new position reads was computed from the same tokens, here or for another sequence.
            for position in range(0 if window is None else max(chunk.start + 1 - window, 0), end):
                tokens = tuple(sequence.tokens[: position + 1])
                assert written.get(table.place(position)) == tokens, "reads what other tokens have written, or nothing"
        self.positions += chunk.count
        self.manager.computed(sequence, end)
        if chunk.is_last:
            self.sample(sequence)

    def sample(self, sequence: RunningSequence) -> None:
        # A function of the tokens and of the number of the sequence, so that some of those that begin alike stay alike.
        sequence.tokens.append((sum(sequence.tokens) + sequence.index) % 5)
        if len(sequence.generated) == sequence.request.sampling.max_tokens:
            self.scheduler.remove(sequence)
            self.ended[sequence] = list(sequence.generated)


def random_request(draw: random.Random) -> tuple[tuple[int, ...], int, int, int]:
    prompt = (*ROOT[: draw.randint(0, len(ROOT))], *(draw.randint(1, 5) for _ in range(draw.randint(1, 6))))
    return prompt, draw.randint(1, 8), draw.randint(-1, 1), draw.randint(1, 2)


@pytest.mark.parametrize("positions", [0, 10, 200], ids="{} more".format)
@pytest.mark.parametrize("kind", WINDOWS)
def test_rules_hold_for_requests_that_arrive_at_any_time(kind: str, positions: int) -> None:
    draw = random.Random(f"{kind} {positions}")
    simulation = Simulation(WINDOWS[kind], positions)
    asked = 0
    for number in range(80):
        prompt, tokens, priority, n = random_request(draw)
        simulation.add(number, prompt, tokens, priority, n)
        asked += n
        for _ in range(draw.randint(0, 4)):
            if not simulation.scheduler.is_idle:
                simulation.step()
    # No starvation: the first sequence advances in each step, so that all end.
    while not simulation.scheduler.is_idle:
        simulation.step()
        assert simulation.steps < 2000
    assert len(simulation.ended) == asked
    assert simulation.manager.used_blocks == 0
    # Freed blocks were used again, and prefixes were found.
    assert simulation.positions > sum(pool.count for pool in simulation.manager.pools) * BLOCK
    assert simulation.scheduler.cached_tokens > 0
    if positions != 10:
        assert (simulation.scheduler.preemptions > 0) == (positions == 0)


def test_requests_of_one_priority_end_their_prompts_in_the_order_of_arrival() -> None:
    simulation = Simulation((None,), 200)
    begun: list[int] = []
    for number in range(12):
        simulation.add(number, tuple(range(1, 12)), 3)
    while not simulation.scheduler.is_idle:
        simulation.step()
        begun += [one.request.id for one in simulation.scheduler.running if one.request.id not in begun]
    assert begun == list(range(12))


def test_a_prompt_that_was_computed_is_found_but_for_its_last_position() -> None:
    simulation = Simulation((None,), 200)
    for number in range(2):
        simulation.add(number, ROOT, 1)
        while not simulation.scheduler.is_idle:
            simulation.step()
    # 10 tokens in blocks of 2: the last position is computed for its logits, and with it its block.
    assert simulation.scheduler.cached_tokens == 8
    assert simulation.positions == 10 + 2
