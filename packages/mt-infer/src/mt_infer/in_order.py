"""Many requests at a time, answered in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from mt_infer.completions import Completion
from mt_infer.config import InferenceConfig
from mt_infer.prompts import Prompt
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.text import TextGenerator

ItemT = TypeVar("ItemT")
Request = tuple[Prompt, SamplingParameters, Mapping[str, Tensor]]
"""A prompt, how it is continued, and what the model takes beside it."""


@dataclass
class Answered(Generic[ItemT]):
    """An item with the completions of its request; of an item without a request there are none."""

    item: ItemT
    completions: list[Completion]

    @property
    def is_done(self) -> bool:
        return all(completion.finish is not None for completion in self.completions)


def answered_in_order(
    generator: TextGenerator, items: Iterable[ItemT], submit: Callable[[ItemT], tuple[int, int] | None]
) -> Iterator[Answered[ItemT]]:
    """submit: submits an item's request and returns its number and its n; None for an item that has none.

    Each is yielded when it and all before it are done. Twice as many run or wait as the engine takes.
    """
    # Twice the engine's own number: requests are ready when some end, and the items read ahead stay few.
    most = 2 * generator.config.section(InferenceConfig).max_requests
    waiting = iter(items)
    queue: deque[Answered[ItemT]] = deque()
    running: dict[int, Answered[ItemT]] = {}
    exhausted = False
    while not exhausted or queue:
        # `queue` also has answered items that wait for one before them: without a bound on it, one long answer would
        # make the rest of a large file pile up behind it.
        while not exhausted and len(running) < most and len(queue) < 2 * most:
            try:
                # Before submit(): an item without a request keeps its place, and is done at once.
                queue.append(Answered(next(waiting), []))
            except StopIteration:
                exhausted = True
                break
            if (request := submit(queue[-1].item)) is not None:
                number, count = request
                queue[-1].completions = [Completion() for _ in range(count)]
                running[number] = queue[-1]
        while queue and queue[0].is_done:
            yield queue.popleft()
        if queue:
            _step(generator, running)


def _step(generator: TextGenerator, running: dict[int, Answered[ItemT]]) -> None:
    for event in generator.step():
        answered = running[event.request]
        answered.completions[event.index].add(event)
        if answered.is_done:
            del running[event.request]


def complete(generator: TextGenerator, requests: Iterable[Request]) -> Iterator[Completion]:
    """The completion of each request of one sequence, in order. Raises ConfigError for one that cannot be served, or
    that ends with an error."""
    answered = answered_in_order(generator, requests, lambda request: (generator.submit(*request), 1))
    return (answer.completions[0].require_complete() for answer in answered)
