"""An exception for one request, wherever it comes from as its tokens are chosen, ends that request and no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.infer.engines import configuration, engine_of, prompts, run, tokens_of
from tests.infer.server.served import generator, language_model, live

from mt_infer import beams, chunk_results
from mt_infer import engine as engine_module
from mt_infer.chunk_results import results_from_logits
from mt_infer.engine import InferenceEngine
from mt_infer.requests import SAMPLING_FAILED, TEXT_FAILED, FinishReason, TokenEvent
from mt_infer.sampling import sampler
from mt_infer.sampling.beam_search import BeamSearch
from mt_infer.sampling.constraints import Matcher
from mt_infer.sampling.parameters import SamplingParameters

BROKEN = 77
"""The seed of the request that fails."""


def fails(_: object) -> None:
    raise IndexError("a defect")


def failing(real: Callable[..., Any], rows_of: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
    """`real`, which raises where one of its sequences is of the broken request."""

    def function(*args: Any, **kwargs: Any) -> Any:
        if any(one.request.sampling.seed == BROKEN for one in rows_of(*args)):
            fails(args)
        return real(*args, **kwargs)

    return function


PLACES = {
    "score_prompts": (chunk_results, "_prompt_logprobs", lambda chunk, *_: [chunk.sequence]),
    "adjust": (sampler, "adjust", lambda _, rows: [row.sequence for row in rows]),
    "choose": (sampler, "probabilities", lambda _, rows: [row.sequence for row in rows]),
    "follow": (chunk_results, "_continuation", lambda sequence, _: [sequence]),
}
BEAM_PLACES = {
    "candidates": (chunk_results, "beam_candidates", lambda _, sequences: sequences),
    "likeliest": (beams, "_likeliest", lambda _, sequence: [sequence]),
}


def engine(**inference: Any) -> InferenceEngine:
    return engine_of(configuration("llama", inference=inference))


def ends(events: Sequence[TokenEvent]) -> list[tuple[int, str | None, str | None]]:
    return [(one.index, one.finish, one.error) for one in events if one.finish is not None]


def assert_it_fails_alone(own: InferenceEngine, **broken: Any) -> None:
    """In the first places of a batch, in the middle, and last."""
    plain = {"temperature": 1.0, "max_tokens": 5, "repetition_penalty": 1.1, "prompt_logprobs": 0}
    others = [SamplingParameters(seed=seed, **plain) for seed in (1, 2)]
    bad = SamplingParameters(seed=BROKEN, **{**plain, **broken})
    texts = prompts(5, 9)
    alone = [tokens_of(events) for events in run(own, texts, others)]
    for place in range(3):
        asked = [*others[:place], bad, *others[place:]]
        found = run(own, [*texts[:place], prompts(7)[0], *texts[place:]], asked)
        ended = found.pop(place)
        assert ends(ended) == [(index, FinishReason.ERROR, SAMPLING_FAILED) for index in range(bad.n)]
        assert [tokens_of(events) for events in found] == alone
    assert own.manager.used_blocks == 0
    assert own.is_idle


@pytest.mark.parametrize("inference", [{}, {"speculative_method": "ngram", "speculative_ngram": 1}], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_a_failing_request_ends_alone(place: str, inference: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, rows_of = PLACES[place]
    monkeypatch.setattr(module, name, failing(getattr(module, name), rows_of))
    assert_it_fails_alone(engine(**inference), n=2)


@pytest.mark.parametrize("place", BEAM_PLACES)
def test_a_failing_search_ends_alone(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, rows_of = BEAM_PLACES[place]
    monkeypatch.setattr(module, name, failing(getattr(module, name), rows_of))
    assert_it_fails_alone(engine(), num_beams=2, n=2)


def test_a_search_that_fails_over_all_its_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BeamSearch, "advance", lambda self, *_: fails(self))
    assert_it_fails_alone(engine(), num_beams=2, n=2)


def test_an_error_that_other_ranks_may_not_have_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would go on with the sequence, and wait for this rank."""

    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(chunk_results, "verify", no_memory)
    own = engine()
    assert ends(run(own, prompts(5), SamplingParameters(seed=1))[0]) == [(0, FinishReason.ERROR, SAMPLING_FAILED)]
    monkeypatch.setattr(
        engine_module, "results_from_logits", lambda *args, **_: results_from_logits(*args, alone=False)
    )
    with pytest.raises(torch.OutOfMemoryError):
        run(own, prompts(5), SamplingParameters(seed=1))


def test_a_text_that_cannot_be_decoded_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = generator()
    decode = own.tokenizer.decode
    refused = SamplingParameters(seed=3, max_tokens=9, forced_tokens=(1, 250))
    monkeypatch.setattr(own.tokenizer, "decode", lambda ids: fails(ids) if 250 in ids else decode(ids))
    others = SamplingParameters(seed=4, max_tokens=9, banned_token_ids=(250,))
    ((bad,), (good,)) = own.generate(["a", "b"], [refused, others])
    assert (bad.error, bad.finish) == (TEXT_FAILED, FinishReason.ERROR)
    assert (good.error, len(good.tokens)) == (None, 9)
    assert own.engine.engine.manager.used_blocks == 0


def test_a_server_goes_on_after_a_request_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Matcher, "_mask", lambda *_: fails(None))
    with live([language_model("m", 1)]) as served:
        asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        status, answer = served.call("/v1/chat/completions", {**asked, "response_format": {"type": "json_object"}})
        assert (status, answer["error"]["message"]) == (500, SAMPLING_FAILED)
        assert served.call("/health")[0] == 200
        assert served.call("/v1/chat/completions", asked)[0] == 200
