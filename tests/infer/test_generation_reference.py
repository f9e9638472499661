"""Tokens of the engine are those of transformers with the same weights: greedy, drawn, penalized, and of beams."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.infer.beams import BEAMS, Beams, beams_of
from tests.infer.engines import logprobs_of, prompts, run, tokens_of
from tests.infer.references import engine_like, reference, reference_tokens
from torch import Tensor
from transformers import StoppingCriteria

from mt_core.interfaces import SpecialTokens
from mt_infer.requests import TokenEvent
from mt_infer.sampling.parameters import SamplingParameters

MODELS = ["gpt2", "llama", "mixtral", "bamba"]
PENALTIES = {"repetition_penalty": 1.5, "bad_words_ids": ((3, 4), (8,)), "logit_bias": {5: 1.5}, "min_tokens": 6}
SAMPLING = [
    SamplingParameters(temperature=0.0, max_tokens=12, logprobs=2),
    SamplingParameters(temperature=0.0, max_tokens=12, logprobs=2, stop_token_ids=(7, 50, 60), **PENALTIES),
    SamplingParameters(temperature=0.9, seed=3, max_tokens=12, logprobs=2, **PENALTIES),
    SamplingParameters(temperature=1.3, seed=4, max_tokens=12, logprobs=2, top_p=0.9, top_p_decay=0.9, top_k=40),
    SamplingParameters(temperature=0.8, seed=5, max_tokens=12, logprobs=2, min_p=0.05, typical_p=0.9),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_log_probabilities(name: str) -> None:
    texts = prompts(5, 21, 3, 9, 12)
    found = run(engine_like(name), texts, SAMPLING)
    for text, events, sampling in zip(texts, found, SAMPLING, strict=True):
        assert tokens_of(events) == reference_tokens(reference(name), text, sampling)
        assert_log_probabilities(name, text, events)


@torch.no_grad()
def assert_log_probabilities(name: str, text: Sequence[int], events: Sequence[TokenEvent]) -> None:
    """Of the model itself, whatever was done to its logits."""
    tokens = tokens_of(events)
    logs = reference(name)(torch.tensor([[*text, *tokens]])).logits[0].float().log_softmax(-1)
    expected = [logs[len(text) - 1 + place, token].item() for place, token in enumerate(tokens)]
    assert logprobs_of(events) == pytest.approx(expected, abs=1e-4)
    for place, event in enumerate(events):
        if event.logprobs is not None:
            best = logs[len(text) - 1 + place].topk(len(event.logprobs.top))
            assert [token for token, _ in event.logprobs.top] == best.indices.tolist()


Transitions = list[list[float]]
"""Of each beam, of each token."""


@torch.no_grad()
def reference_beams(name: str, text: Sequence[int], sampling: SamplingParameters) -> tuple[Beams, Transitions]:
    stops, criterion = list(sampling.stop_token_ids) or None, Contains(sampling.stop, len(text))
    found = reference(name).generate(
        torch.tensor([list(text)]),
        num_beams=sampling.num_beams,
        num_return_sequences=sampling.n,
        max_new_tokens=sampling.max_tokens,
        min_new_tokens=sampling.min_tokens or None,
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
        repetition_penalty=sampling.repetition_penalty,
        eos_token_id=stops,
        pad_token_id=0,
        stopping_criteria=[criterion],
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = [criterion.until(row[len(text) :].tolist()) for row in found.sequences]
    sequences = [until_stop(row, sampling.stop_token_ids) for row in rows]
    beams = list(zip(sequences, found.sequences_scores.tolist(), strict=True))
    if sampling.stop:  # transformers cannot, for beams that a criterion ends
        return beams, []
    scores = reference(name).compute_transition_scores(found.sequences, found.scores, found.beam_indices)
    return beams, [row[: len(own)].tolist() for row, own in zip(scores, sequences, strict=True)]


def assert_transitions(
    events: Sequence[TokenEvent], sampling: SamplingParameters, expected: Transitions, name: str, text: Sequence[int]
) -> None:
    """The log-probabilities of beams, where they were requested, are transformers' transition scores."""
    for index, transitions in enumerate(expected):
        own = [event for event in events if event.index == index]
        if sampling.logprobs is None:
            assert logprobs_of(own) == []
            continue
        assert logprobs_of(own) == pytest.approx(transitions, abs=1e-4)
        if sampling.repetition_penalty == 1.0:
            assert_log_probabilities(name, text, own)
        if sampling.prompt_logprobs is not None:
            logs = reference(name)(torch.tensor([list(text)])).logits[0].float().log_softmax(-1)
            found = [one.token for one in own[0].prompt_logprobs or () if one is not None]
            assert found == pytest.approx([logs[at, token].item() for at, token in enumerate(text[1:])], abs=1e-4)


class Pairs:
    """Each of 101 ids is two letters."""

    vocab_size = 101
    special = SpecialTokens()

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + token // 10) + chr(97 + token % 10) for token in ids)


class Contains(StoppingCriteria):
    """transformers' criterion for each row: whether the text behind the prompt has one of these."""

    def __init__(self, texts: Sequence[str], prompt_length: int) -> None:
        self.texts, self.prompt_length = texts, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor, **others: object) -> Tensor:
        return torch.tensor([self.holds(row[self.prompt_length :].tolist()) for row in input_ids])

    def holds(self, tokens: Sequence[int]) -> bool:
        return any(text in Pairs().decode(tokens) for text in self.texts)

    def until(self, tokens: list[int]) -> list[int]:
        """Without the filler behind the text."""
        ends = (count for count in range(1, len(tokens)) if self.holds(tokens[:count]))
        return tokens[: next(ends, len(tokens))]


def until_stop(tokens: list[int], stops: Sequence[int]) -> list[int]:
    return tokens[: next((place for place, token in enumerate(tokens) if token in stops), len(tokens))]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_beams(name: str) -> None:
    """In one batch with other requests, in a cache in which they have to wait for one another."""
    texts = prompts(5, 21, 3, 9, 6, 4, 8)
    asked = [*BEAMS, SAMPLING[0]]
    engine = engine_like(name, max_requests=7, cache_block_size=2)
    found = run(engine, texts, asked)
    for text, events, sampling in zip(texts, found[:-1], BEAMS, strict=False):
        expected, transitions = reference_beams(name, text, sampling)
        own = beams_of(events, sampling)
        assert [tokens for tokens, _ in own] == [tokens for tokens, _ in expected]
        assert [score for _, score in own] == pytest.approx([score for _, score in expected], abs=1e-4)
        assert_transitions(events, sampling, transitions, name, text)
    assert tokens_of(found[-1]) == reference_tokens(reference(name), texts[-1], SAMPLING[0])
    assert engine.manager.used_blocks == 0


STOPS = tuple(first + second for first in "bdg" for second in "acfh")


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParameters(num_beams=4, n=4, max_tokens=9, stop=STOPS),
        SamplingParameters(num_beams=3, n=2, max_tokens=9, stop=("a", "f"), early_stopping=True, length_penalty=2.0),
        SamplingParameters(num_beams=3, n=3, max_tokens=9, stop=STOPS, stop_token_ids=tuple(range(0, 101, 9))),
    ],
)
def test_beams_end_with_stop_texts(sampling: SamplingParameters) -> None:
    """Also with texts that begin within one token and end within the next."""
    engine, ended = engine_like("llama"), []
    engine.new_sequences.tokenizer = Pairs()
    for text in prompts(5, 9, 3, 7):
        (events,) = run(engine, [text], sampling)
        (expected, _), own = reference_beams("llama", text, sampling), beams_of(events, sampling)
        assert [tokens for tokens, _ in own] == [tokens for tokens, _ in expected]
        assert [score for _, score in own] == pytest.approx([score for _, score in expected], abs=1e-4)
        ended += [Contains(sampling.stop, 0).holds(tokens) for tokens, _ in own]
    assert any(ended)
