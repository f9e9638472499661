"""Logits with everything applied that requests ask for, against the processors of transformers."""

from __future__ import annotations

import pytest
import torch
from tests.infer.references import VOCAB, processed, row_of

from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.sampling.sampler import adjusted, choose, probabilities

PROMPT, GENERATED = (5, 9, 5, 60), (7, 7, 8)
REQUESTS = {
    "default": {},
    "temperature": {"temperature": 0.3},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.6},
    "decayed top-p": {"top_p": 0.9, "top_p_decay": 0.6, "top_p_bound": 0.3},
    "bounded top-p": {"top_p": 0.9, "top_p_decay": 0.3, "top_p_bound": 0.3},
    "min-p": {"min_p": 0.2},
    "typical": {"typical_p": 0.5},
    "all measures": {"temperature": 1.7, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": {3: 2.5, 8: -4.0}},
    "banned": {"banned_token_ids": (1, 90)},
    "bad words": {"bad_words_ids": ((7, 8, 4), (8, 6), (9, 8, 5), (2,))},
    "too early": {"min_tokens": 4, "stop_token_ids": (11, 12)},
    "late enough": {"min_tokens": 3, "stop_token_ids": (11, 12)},
    "everything": {
        "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 0.6, "logit_bias": {7: 1.0}, "banned_token_ids": (20,),
        "bad_words_ids": ((8, 30),), "min_tokens": 9, "stop_token_ids": (40,),
    },
}  # fmt: skip


def logits_of(rows: int) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0))


def requests() -> list[SamplingParameters]:
    return [SamplingParameters(**{"max_tokens": 50, **keys}) for keys in REQUESTS.values()]


def test_each_row_is_what_transformers_makes_of_it() -> None:
    logits, asked = logits_of(len(REQUESTS)), requests()
    rows = [row_of(sampling, PROMPT, GENERATED) for sampling in asked]
    found = probabilities(adjusted(logits, rows), rows)
    for name, own, sampling, before in zip(REQUESTS, found, asked, logits, strict=True):
        expected = processed(sampling, before, len(PROMPT), [*PROMPT, *GENERATED]).softmax(-1)
        assert torch.equal(own > 0, expected > 0), name
        torch.testing.assert_close(own, expected, atol=1e-6, rtol=1e-5, msg=name)


def test_a_row_does_not_depend_on_the_others_to_the_last_bit() -> None:
    logits, asked = logits_of(len(REQUESTS)), requests()
    rows = [row_of(sampling, PROMPT, GENERATED) for sampling in asked]
    together = probabilities(adjusted(logits, rows), rows)
    for number, row in enumerate(rows):
        alone = logits[number : number + 1]
        assert torch.equal(probabilities(adjusted(alone, [row]), [row])[0], together[number])


def test_arguments_stay_as_they_are() -> None:
    logits = logits_of(len(REQUESTS))
    before = logits.clone()
    choose(logits, [row_of(sampling, PROMPT, GENERATED) for sampling in requests()])
    assert torch.equal(logits, before)


def test_frequency_and_presence_penalties_count_generated_tokens() -> None:
    """OpenAI's definition: logit - count * frequency - (count > 0) * presence."""
    logits = logits_of(1)
    row = row_of(SamplingParameters(frequency_penalty=0.5, presence_penalty=0.25, max_tokens=9), PROMPT, GENERATED)
    expected = logits[0].clone()
    expected[7] -= 2 * 0.5 + 0.25
    expected[8] -= 0.5 + 0.25
    torch.testing.assert_close(adjusted(logits, [row])[0], expected)


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-6, 1e-5])
def test_a_temperature_close_to_zero_takes_the_likeliest(temperature: float) -> None:
    logits = logits_of(4)
    rows = [row_of(SamplingParameters(temperature=temperature, seed=seed), PROMPT) for seed in range(4)]
    assert torch.equal(choose(logits, rows), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_tokens_come_first(temperature: float) -> None:
    sampling = SamplingParameters(temperature=temperature, forced_tokens=(33, 44), banned_token_ids=(44,))
    rows = [row_of(sampling, PROMPT, generated) for generated in ((), (33,), (33, 44))]
    chosen = choose(logits_of(3), rows).tolist()
    assert chosen[:2] == [33, 44]
    assert chosen[2] != 44


@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.9, 0.999])
def test_top_p_on_large_and_small_probabilities(top_p: float) -> None:
    """Peaked, flat and in between: the likeliest is kept, the kept ones reach top_p, and one less would not."""
    row = row_of(SamplingParameters(top_p=top_p), PROMPT)
    for scale in (0.01, 1.0, 5.0, 30.0):
        logits = scale * torch.randn(1, 5000, generator=torch.Generator().manual_seed(1))
        before, kept = logits.double().softmax(-1)[0], probabilities(logits, [row])[0] > 0
        assert kept[before.argmax()]
        assert before[kept].sum() >= top_p - 1e-5
        assert before[kept].sum() - before[kept].min() < top_p + 1e-5
        assert before[~kept].max() <= before[kept].min()
