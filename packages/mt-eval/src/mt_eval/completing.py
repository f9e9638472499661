"""Many requests at a time, answered in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from mt_infer.completions import Completion
from mt_infer.prompts import Prompt
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.text import TextGenerator

Request = tuple[Prompt, SamplingParameters, Mapping[str, Tensor]]
"""A prompt, how it is continued, and what the model takes beside it."""


def complete(generator: TextGenerator, requests: Iterable[Request]) -> Iterator[Completion]:
    """The completion of each request of one sequence, in order. As many are computed at a time as the engine takes, and
    as many wait. Raises ConfigError for a request that the engine cannot serve."""
    most = 2 * generator.config.inference.max_requests
    waiting = iter(requests)
    running: dict[int, Completion] = {}
    order: deque[int] = deque()
    while True:
        while len(order) < most and (request := next(waiting, None)) is not None:
            number = generator.submit(*request)
            running[number] = Completion()
            order.append(number)
        while order and running[order[0]].finish is not None:
            yield running.pop(order.popleft())
        if not order:
            return
        if running[order[0]].finish is None:
            for event in generator.step():
                running[event.request].add(event)
