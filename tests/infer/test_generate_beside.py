"""`generate` and `stream` of a TextGenerator that has open requests of another caller."""

from __future__ import annotations

from tests.infer.server.served import generator

from mt_infer.completions import Completion
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.text import TextGenerator

GREEDY = SamplingParameters(temperature=0.0, max_tokens=6)
LONG = SamplingParameters(temperature=0.0, max_tokens=20)


def alone(prompt: str, sampling: SamplingParameters) -> str:
    return generator().generate([prompt], sampling)[0][0].text


def finish(shared: TextGenerator, request: int) -> str:
    done = Completion()
    while not shared.is_idle:
        for event in shared.step():
            assert event.request == request
            done.add(event)
    assert done.finish is not None
    return done.text


def test_generate_beside_an_open_request_leaves_it_its_events() -> None:
    shared = generator()
    for open_sampling in (LONG, SamplingParameters(temperature=0.0, max_tokens=2)):  # outlives `generate`, or not
        request = shared.submit("The quick", open_sampling)
        assert shared.generate(["zebra"], GREEDY)[0][0].text == alone("zebra", GREEDY)
        assert not shared.is_idle
        assert finish(shared, request) == alone("The quick", open_sampling)


def test_streams_in_turn_have_their_own_texts() -> None:
    shared = generator()
    first, second = shared.stream("The quick", LONG), shared.stream("two", GREEDY)
    texts = [next(first), next(second), next(first)]
    assert shared.generate(["three"], GREEDY)[0][0].text == alone("three", GREEDY)
    assert texts[1] + "".join(second) == alone("two", GREEDY)
    assert texts[0] + texts[2] + "".join(first) == alone("The quick", LONG)
    assert shared.is_idle


def test_a_cancelled_request_has_no_events_left() -> None:
    shared = generator()
    request = shared.submit("The quick", LONG)
    shared.generate(["zebra"], GREEDY)
    shared.cancel(request)
    shared.step()
    assert shared.is_idle
    assert shared.step() == []
