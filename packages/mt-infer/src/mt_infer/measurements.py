"""Measurements of an engine: latencies under requests that arrive at random times (a Poisson process), the time of
forward passes on the device, and the perplexity that quantization costs.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mt_core.errors import DataError
from mt_infer.quantization.weights import product_of, weight_bytes
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.text import TextGenerator

if TYPE_CHECKING:
    from mt_infer.engine import InferenceEngine


Seconds = Callable[[], float]
"""The duration of a pass; waits for the device until it is known."""


class PassTimes:
    """Within its `with` block: the passes of an engine, eager ones and replays of its graphs, from the call until the
    device has computed the logits."""

    def __init__(self, engine: InferenceEngine) -> None:
        # What the engine takes logits from.
        self._sources: list[Any] = [source for source in (engine.runner, engine.graphs) if source is not None]
        self._begin = _begin_on_device if engine.ctx.device.type == "cuda" else _begin_on_host
        self._is_running = False
        self.passes: list[Seconds] = []

    @property
    def seconds(self) -> float:
        return sum(seconds() for seconds in self.passes)

    def __enter__(self) -> PassTimes:
        for source in self._sources:
            # On the instance, over the method of the class; __exit__ deletes it.
            source.logits = self._timed(source.logits)
        return self

    def __exit__(self, *error: object) -> None:
        for source in self._sources:
            del source.logits

    def _timed(self, logits: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            # A graph's first use runs and captures the runner's pass, where no event may be recorded.
            if self._is_running:
                return logits(*arguments)
            self._is_running, end = True, self._begin()
            try:
                output = logits(*arguments)
            finally:
                self._is_running = False
            self.passes.append(end())
            return output

        return timed


def _begin_on_host() -> Callable[[], Seconds]:
    started = time.perf_counter()

    def end() -> Seconds:
        duration = time.perf_counter() - started
        return lambda: duration

    return end


def _begin_on_device() -> Callable[[], Seconds]:
    # Events and no synchronization, so that the host prepares the sampling while the device computes, as without a
    # measurement. The device is idle at the beginning of a pass: the last one's tokens have been read.
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started.record()

    def seconds() -> float:
        ended.synchronize()
        return started.elapsed_time(ended) / 1000.0  # of milliseconds

    def end() -> Seconds:
        ended.record()
        return seconds

    return end


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
        return sum(len(request.tokens) for request in self.requests) / self.seconds

    def percentiles(self, values: Callable[[Served], Sequence[float]]) -> dict[int, float]:
        """Percentile -> seconds, over all values of all requests."""
        every = sorted(value for request in self.requests for value in values(request))
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
    waiting = sorted(zip(times, prompts, strict=True), key=lambda pair: pair[0])
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
                served = running[event.request]
                if event.token is not None:
                    served.tokens.append(time.perf_counter() - started)
                if event.finish is not None:
                    done.append(running.pop(event.request))
        seconds = time.perf_counter() - started
    return LoadResult(done, seconds, 1 - passes.seconds / max(seconds - idle, 1e-9))


Settings = Mapping[str, Mapping[str, Any]]
FORMS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "weights int8": {"quantize_weights": "int8"},
    "int8_dynamic": {"quantize_weights": "int8_dynamic"},
    "weights fp8": {"quantize_weights": "fp8"},
    "weights int4": {"quantize_weights": "int4"},
    "cache int8": {"cache_dtype": "int8"},
    "cache fp8": {"cache_dtype": "fp8"},
}


@dataclass(frozen=True)
class Measured:
    """name: of the form. perplexity: of a token. weights: bytes. position: bytes of a position in the cache.

    product: how products with quantized weights are computed.
    """

    name: str
    perplexity: float
    weights: int
    position: int
    product: str


def measure(path: Path, text: str, device: str, settings: Settings) -> Iterator[Measured]:
    """Measures each form, one loaded model after another. Raises DataError for a text of less than two tokens."""
    for name, keys in FORMS.items():
        inference = {**settings.get("inference", {}), **keys}
        generator = TextGenerator.load(path, device=device, settings={**settings, "inference": inference})
        engine = generator.engine.engine
        position = sum(group.bytes_per_position for group in engine.manager.layout.groups)
        weights, product = weight_bytes(engine.model), product_of(engine.model)
        yield Measured(name, perplexity(generator, text), weights, position, product)


def perplexity(generator: TextGenerator, text: str) -> float:
    """exp of the mean negative log-probability of a token, in windows of the longest sequence."""
    windows = [window for window in cut(generator.tokenizer.encode(text), generator.longest) if len(window) > 1]
    if not windows:
        raise DataError("the text has less than two tokens, and the first has no probability; take a longer one")
    # Each window starts anew, so that its first token has no score.
    scores = [score for scored in generator.score(windows) for score in scored]
    return math.exp(-sum(scores) / len(scores))


def cut(tokens: Sequence[int], length: int) -> list[list[int]]:
    return [list(tokens[start : start + length]) for start in range(0, len(tokens), length)]
