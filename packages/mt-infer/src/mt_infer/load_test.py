"""Latencies of an engine whose requests arrive at random times (a Poisson process)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mt_infer.pass_times import PassTimes
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.text import TextGenerator

PERCENTILES = (50, 90, 99)


@dataclass
class Served:
    """Times of one request in seconds, from the start of the test. tokens: of each generated token."""

    arrival: float
    tokens: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.tokens[0] - self.arrival

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [after - before for before, after in zip(self.tokens, self.tokens[1:], strict=False)]


@dataclass(frozen=True)
class LoadResult:
    """seconds: of the whole test. outside: share of the time that was not in forward passes."""

    requests: Sequence[Served]
    seconds: float
    outside: float

    @property
    def tokens_per_second(self) -> float:
        return sum(len(one.tokens) for one in self.requests) / self.seconds

    def percentiles(self, values: Callable[[Served], Sequence[float]]) -> dict[int, float]:
        """Percentile -> seconds, over all values of all requests."""
        every = sorted(value for one in self.requests for value in values(one))
        return {share: every[min(len(every) * share // 100, len(every) - 1)] for share in PERCENTILES} if every else {}


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Times of `count` arrivals, `rate` a second on average. An infinite rate: all at once."""
    generator, now = random.Random(seed), 0.0
    times = []
    for _ in range(count):
        times.append(now)
        now += generator.expovariate(rate) if rate != float("inf") else 0.0
    return times


def run_load(
    generator: TextGenerator, prompts: Sequence[Sequence[int]], max_tokens: int, times: Sequence[float]
) -> LoadResult:
    """Serves a prompt at each of the times; each gets exactly max_tokens. Prefixes are forgotten before."""
    engine = generator.engine.engine
    # Forgets prefixes, so that each run computes all of its prompts.
    engine.weights_changed()
    # Greedy and without an end: the work does not depend on what is sampled.
    sampling = SamplingParameters(temperature=0.0, max_tokens=max_tokens, ignore_eod=True)
    waiting = sorted(zip(times, prompts, strict=True), key=lambda one: one[0])
    running: dict[int, Served] = {}
    idle = 0.0  # seconds without requests
    done: list[Served] = []
    with PassTimes(engine) as passes:
        started = time.perf_counter()
        while waiting or running:
            now = time.perf_counter() - started
            while waiting and waiting[0][0] <= now:
                arrival, prompt = waiting.pop(0)
                running[generator.submit(list(prompt), sampling)] = Served(arrival)
            if not running:
                # The engine has no work until the next arrival.
                time.sleep(max(waiting[0][0] - now, 0.0))
                idle += max(waiting[0][0] - now, 0.0)
                continue
            for event in generator.step():
                one = running[event.request]
                if event.token is not None:
                    one.tokens.append(time.perf_counter() - started)
                if event.finish is not None:
                    done.append(running.pop(event.request))
        seconds = time.perf_counter() - started
    return LoadResult(done, seconds, 1 - passes.seconds / max(seconds - idle, 1e-9))
