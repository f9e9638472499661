"""Logits that are no distribution end a request with an error, whatever it reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.infer.engines import configuration, engine_of, prompts, run
from tests.infer.references import VOCAB, row_of

from mt_infer.engine import InferenceEngine
from mt_infer.requests import DIVERGED, FinishReason
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.sampling.sampler import NOT_FINITE, sample

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_distribution_have_no_token(temperature: float) -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[0, 3], logits[1, 4], logits[2] = NAN, INF, -INF
    logits[3, 5:] = -INF  # of which one has
    rows = [row_of(SamplingParameters(max_tokens=9, temperature=temperature, seed=1), (1, 2))] * 5
    tokens = [one.token for one in sample(logits, rows)]
    assert tokens[:3] == [NOT_FINITE] * 3
    assert min(tokens[3:]) >= 0


def diverge(engine: InferenceEngine) -> None:
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.fill_(NAN)


@pytest.fixture(scope="module")
def diverged() -> InferenceEngine:
    engine = engine_of(configuration("llama"))
    diverge(engine)
    return engine


@pytest.mark.parametrize("keys", [{"temperature": 0.0}, {"n": 2, "logprobs": 1}, {"num_beams": 3, "n": 2}])
def test_every_sequence_ends_with_the_error(diverged: InferenceEngine, keys: dict[str, Any]) -> None:
    events = run(diverged, prompts(5, 20), SamplingParameters(max_tokens=4, **keys))
    for own in events:
        assert [(one.index, one.token, one.finish, one.error) for one in own] == [
            (index, None, FinishReason.ERROR, DIVERGED) for index in range(keys.get("n", 1))
        ]
    assert diverged.manager.used_blocks == 0


def test_scores_of_a_prompt_are_reported_as_they_are(diverged: InferenceEngine) -> None:
    ((event,),) = run(diverged, prompts(5), SamplingParameters(max_tokens=0, prompt_logprobs=0))
    assert event.finish == FinishReason.LENGTH
    assert event.prompt_logprobs is not None


def test_tokens_before_it_stay() -> None:
    """With drafts, which are verified together with the token that cannot be sampled."""
    engine = engine_of(configuration("llama", inference={"speculative_method": "ngram"}))
    engine.add([5, 6, 5, 6, 5, 6], SamplingParameters(max_tokens=40, temperature=0.0))
    events = [event for _ in range(3) for event in engine.step()]
    diverge(engine)
    while not engine.is_idle:
        events += engine.step()
    assert all(event.token is not None and event.finish is None for event in events[:-1])
    assert (events[-1].token, events[-1].error) == (None, DIVERGED)
