"""The `openai` package against a live server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from tests.infer.server.served import CONTEXT, VOCABULARY, Live, configuration, generator, live, model_of, openai_client

from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_infer.embedding import TextEmbedder
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.server.errors import ApiError
from mt_infer.server.openai.fields import SamplingFields
from mt_infer.server.openai.response_fields import ResponseBody
from mt_infer.server.openai.sampling import constraint
from mt_infer.server.served_model import ServedModel

if TYPE_CHECKING:
    import openai

PROMPT = "The quick brown"
CHATML = "<|im_start|>{}\n{}<|im_end|>\n"


@pytest.fixture(scope="module")
def client(served: Live) -> openai.OpenAI:
    return openai_client(served)


@pytest.fixture(scope="module")
def alpha():
    """The weights of the served model, in an engine of its own."""
    return generator(1)


def greedy(alpha, prompt: str | list[int], count: int) -> str:
    return alpha.generate([prompt], SamplingParameters(temperature=0.0, max_tokens=count))[0][0].text


@pytest.mark.slow
def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["alpha", "beta", "bert"]
    assert client.models.retrieve("beta").id == "beta"


@pytest.mark.slow
def test_prompts_of_every_form_are_completed(client: openai.OpenAI, alpha) -> None:
    ids = list(PROMPT.encode())
    expected = greedy(alpha, PROMPT, 12)
    for prompt, count in ((PROMPT, 1), ([PROMPT, PROMPT], 2), (ids, 1), ([ids, ids], 2)):
        done = client.completions.create(model="alpha", prompt=prompt, max_tokens=12, temperature=0)
        assert [(one.index, one.text) for one in done.choices] == [(place, expected) for place in range(count)]
        assert done.usage is not None
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(ids) * count, 12 * count)
        assert {one.finish_reason for one in done.choices} == {"length"}


LETTERS = {"banned_token_ids": list(range(0, 256, 2)), "bad_words": ["a", "c"], "forced_tokens": [101, 103]}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (LETTERS, {**LETTERS, "bad_words": None, "bad_words_ids": [[97], [32, 97], [99], [32, 99]]}),
        ({"top_p": 0.9, "top_p_decay": 0.9, "top_p_bound": 0.1}, {}),
        ({"typical_p": 0.3}, {}),
        ({"n": 3, "use_beam_search": True, "length_penalty": 2.0, "early_stopping": True}, {"num_beams": 3}),
    ],
)
def test_fields_of_other_servers_are_the_engines(client: openai.OpenAI, alpha, fields, expected) -> None:
    done = client.completions.create(model="alpha", prompt=PROMPT, max_tokens=6, seed=4, extra_body=fields)
    given = {**fields, **expected, "max_tokens": 6, "seed": 4}
    engines = {name: value for name, value in given.items() if value is not None and name != "use_beam_search"}
    (several,) = alpha.generate([PROMPT], SamplingParameters(**engines))
    assert [choice.text for choice in done.choices] == [one.text for one in several]


def test_log_probabilities_of_prompts_in_vllms_form(client: openai.OpenAI, alpha) -> None:
    done = client.completions.create(model="alpha", prompt=PROMPT, max_tokens=1, extra_body={"prompt_logprobs": 2})
    first, *rows = done.choices[0].model_extra["prompt_logprobs"]
    ids = list(PROMPT.encode())
    assert first is None
    own = [row[str(token)]["logprob"] for row, token in zip(rows, ids[1:], strict=True)]
    assert own == pytest.approx(alpha.score([PROMPT])[0], abs=1e-5)
    assert all(sorted(entry["rank"] or 0 for entry in row.values())[-2:] == [1, 2] for row in rows)
    assert [row[str(token)]["decoded_token"] for row, token in zip(rows, ids[1:], strict=True)] == list(PROMPT[1:])
    asked = {"model": "alpha", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    chat = client.chat.completions.create(**asked, extra_body={"prompt_logprobs": 0})
    assert [len(row or ()) for row in chat.model_extra["prompt_logprobs"]] == [0] + [1] * (chat.usage.prompt_tokens - 1)


def test_a_stream_has_the_text_of_the_whole_answer(client: openai.OpenAI) -> None:
    asked = {"model": "alpha", "prompt": [PROMPT, "A"], "n": 2, "seed": 5, "max_tokens": 9, "logprobs": 1}
    whole = client.completions.create(**asked)
    pieces = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        own = [one for piece in pieces for one in piece.choices if one.index == choice.index]
        assert "".join(one.text for one in own) == choice.text
        assert [one.finish_reason for one in own if one.finish_reason] == [choice.finish_reason]
        tokens = [token for one in own if one.logprobs for token in one.logprobs.tokens]
        assert tokens == choice.logprobs.tokens
    assert [piece.usage for piece in pieces if piece.usage] == [whole.usage]
    assert len({choice.text for choice in whole.choices}) > 1


def test_same_seed_same_text(client: openai.OpenAI) -> None:
    def text(seed: int) -> str:
        return client.completions.create(model="alpha", prompt=PROMPT, seed=seed, max_tokens=8).choices[0].text

    assert text(1) == text(1) != text(2)


def test_echoed_log_probabilities_are_the_models(client: openai.OpenAI, alpha) -> None:
    done = client.completions.create(model="alpha", prompt=PROMPT, echo=True, logprobs=3, max_tokens=1, temperature=0)
    found, text = done.choices[0].logprobs, done.choices[0].text
    ids = list(PROMPT.encode())
    with torch.inference_mode():
        logs = alpha.model(torch.tensor([ids])).float().log_softmax(-1)[0]
    generated = int(logs[-1].argmax())
    expected = [logs[place, token].item() for place, token in enumerate([*ids[1:], generated])]
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert [max(top.values()) for top in found.top_logprobs[1:]] == pytest.approx(
        logs.max(-1).values.tolist(), abs=1e-4
    )
    assert text.startswith(PROMPT)
    assert found.tokens[: len(ids)] == list(PROMPT)
    assert found.text_offset == list(range(len(ids) + 1))


def test_chat_is_the_template_completed(client: openai.OpenAI, alpha) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    prompt = "".join(CHATML.format(one["role"], one["content"]) for one in messages) + "<|im_start|>assistant\n"
    done = client.chat.completions.create(
        model="alpha", messages=messages, max_tokens=10, temperature=0, logprobs=True, top_logprobs=2
    )
    assert done.choices[0].message.role == "assistant"
    assert done.choices[0].message.content == greedy(alpha, prompt, 10)
    assert done.usage.prompt_tokens == len(prompt)
    entries = done.choices[0].logprobs.content
    assert len(entries) == 10
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)
    pieces = client.chat.completions.create(model="alpha", messages=messages, max_tokens=10, temperature=0, stream=True)
    deltas = [piece.choices[0] for piece in pieces]
    assert deltas[0].delta.role == "assistant"
    assert "".join(one.delta.content or "" for one in deltas) == done.choices[0].message.content
    assert deltas[-1].finish_reason == "length"


def test_a_stop_text_ends_the_answer_before_it(client: openai.OpenAI, alpha) -> None:
    text = greedy(alpha, PROMPT, 20)
    stop = text[5:7]
    done = client.completions.create(model="alpha", prompt=PROMPT, max_tokens=20, temperature=0, stop=[stop])
    assert done.choices[0].text == text[: text.index(stop)]
    assert done.choices[0].finish_reason == "stop"


def test_embeddings_are_the_mean_of_the_encoders_states(client: openai.OpenAI, served: Live) -> None:
    texts = ["a text", "a longer text than that"]
    found = client.embeddings.create(model="bert", input=texts)  # asks for base64
    plain = client.embeddings.create(model="bert", input=texts, encoding_format="float")
    model = served.service.models.find("bert").embedder.model
    for text, one, other in zip(texts, found.data, plain.data, strict=True):
        ids = torch.tensor([[259, *text.encode(), 260]])
        with torch.inference_mode():
            expected = model.hidden_states(ids)[0].mean(0).tolist()
        assert one.embedding == pytest.approx(expected, abs=1e-5)
        assert other.embedding == pytest.approx(expected, abs=1e-5)
    assert found.usage.prompt_tokens == sum(map(len, texts)) + 4


def test_answers_are_held_to_a_format(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    done = client.chat.completions.create(model="alpha", messages=CHAT, response_format=form, seed=1)
    assert json.loads(done.choices[0].message.content)["n"] in (1, 2)
    for asked, allowed in (({"guided_regex": "a{3}b"}, ("aaab",)), ({"guided_choice": ["yes", "no"]}, ("yes", "no"))):
        text = client.completions.create(model="alpha", prompt="x", extra_body=asked, seed=1).choices[0].text
        assert text in allowed
    import openai

    with pytest.raises(openai.BadRequestError, match="regex is not valid"):
        client.completions.create(model="alpha", prompt="x", extra_body={"guided_regex": "("})


@pytest.mark.parametrize(
    ("name", "value"),
    [("json", {"type": "object"}), ("regex", "a+"), ("grammar", 'start: "a"'), ("choice", ["yes", "no"])],
)
def test_structured_outputs_are_the_guided_fields_of_the_same_name(name: str, value: object) -> None:
    """vLLM has taken the latter out, so that its clients send the former."""
    expected = constraint(SamplingFields.model_validate({f"guided_{name}": value}))
    assert constraint(SamplingFields.model_validate({"structured_outputs": {name: value}})) == expected
    both = {"structured_outputs": {name: value}, "guided_regex": "b"}
    with pytest.raises(ApiError, match="structured_outputs and guided_"):
        constraint(SamplingFields.model_validate(both))
    with pytest.raises(ValueError, match="give one of json"):
        SamplingFields.model_validate({"structured_outputs": {"regex": "a", "choice": ["b"]}})


def test_an_empty_schema_is_any_json() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": {}}}
    assert constraint(SamplingFields(response_format=form)) == {"json_schema": {}}
    assert constraint(SamplingFields(response_format={"type": "json_object"})) == {"json_schema": {"type": "object"}}


def test_the_best_of_several_has_the_best_mean_log_probability(client: openai.OpenAI) -> None:
    def means(**asked: object) -> list[float]:
        done = client.completions.create(model="alpha", prompt="x", max_tokens=6, logprobs=0, seed=4, **asked)
        rows = [one.logprobs.token_logprobs for one in done.choices]
        return [sum(row) / len(row) for row in rows]

    assert means(best_of=5, n=2) == pytest.approx(sorted(means(n=5), reverse=True)[:2])


def test_penalties_and_bias_change_what_is_likeliest(client: openai.OpenAI) -> None:
    def tokens(**asked: object) -> list[str]:
        done = client.completions.create(model="alpha", prompt="x", max_tokens=8, temperature=0, logprobs=0, **asked)
        return done.choices[0].logprobs.tokens

    free = tokens()
    assert tokens(logit_bias={"97": 100}) == ["a"] * 8
    penalized = tokens(presence_penalty=2, frequency_penalty=2, logit_bias={str(token): 3 for token in range(97, 107)})
    assert len(set(penalized)) > len(set(tokens(logit_bias={str(token): 3 for token in range(97, 107)})))
    assert free == tokens(presence_penalty=0)


CHAT = [{"role": "user", "content": "hi"}]
REFUSED = [
    ("completions", {"model": "gamma", "prompt": "x"}, "NotFoundError", "alpha, beta, bert"),
    ("completions", {"model": "alpha", "prompt": "x" * CONTEXT}, "BadRequestError", f"context is {CONTEXT}"),
    (
        "completions",
        {"model": "alpha", "prompt": "x", "max_tokens": 300},
        "BadRequestError",
        "300 more",
    ),
    ("completions", {"model": "alpha", "prompt": [999]}, "BadRequestError", "ids go from 0 to 260"),
    ("completions", {"model": "alpha", "prompt": "x", "logprobs": 99}, "BadRequestError", "20"),
    ("completions", {"model": "alpha", "prompt": "x", "suffix": "y"}, "BadRequestError", "suffix"),
    ("completions", {"model": "alpha", "prompt": "x", "logit_bias": {"a": 1}}, "BadRequestError", "token id"),
    ("completions", {"model": "alpha", "prompt": "x", "n": 0}, "BadRequestError", "greater than or equal to 1"),
    (
        "completions",
        {"model": "alpha", "prompt": "x", "n": 2, "extra_body": {"guided_regex": "(a?){5000}a{5000}"}},
        "BadRequestError",
        "regex cannot be followed any further",
    ),
    ("completions", {"model": "bert", "prompt": "x"}, "BadRequestError", "encoder"),
    ("chat.completions", {"model": "bert", "messages": CHAT}, "BadRequestError", "encoder"),
    ("chat.completions", {"model": "alpha", "messages": []}, "BadRequestError", "messages: List should have"),
    (
        "chat.completions",
        {"model": "alpha", "messages": CHAT, "top_logprobs": 2},
        "BadRequestError",
        "logprobs=true",
    ),
    ("embeddings", {"model": "alpha", "input": [999]}, "BadRequestError", "ids go from 0 to 260"),
    ("embeddings", {"model": "bert", "input": "x" * CONTEXT}, "BadRequestError", "258 tokens"),
    ("embeddings", {"model": "bert", "input": "x", "dimensions": 8}, "BadRequestError", "dimensions"),
]


@pytest.mark.parametrize(("endpoint", "asked", "error", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_is_refused_with_words_that_help(client: openai.OpenAI, endpoint, asked, error, words) -> None:
    owner = client.chat.completions if endpoint == "chat.completions" else getattr(client, endpoint)
    import openai

    with pytest.raises(getattr(openai, error)) as raised:
        owner.create(**asked)
    assert words in raised.value.body["message"]


def test_an_unknown_field_is_refused(client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="no such field"):
        client.completions.create(model="alpha", prompt="x", extra_body={"temprature": 1})


def test_a_biencoder_embeds_questions_and_documents_by_their_own_towers() -> None:
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
    model_keys = {"family": "biencoder", **sizes, "vocab_size": VOCABULARY, "biencoder_projection_dim": 8}
    model, ctx = model_of(configuration(model_keys), 1)
    embedder = TextEmbedder(model, ByteLevelTokenizer(), ctx.device, VOCABULARY)
    with live([ServedModel("two", 0, embedder=embedder)]) as served:
        client = openai_client(served)
        for side, tower in (("query", model.query_tower), ("document", model.context_tower)):
            done = client.embeddings.create(model="two", input=["ab", "abcd"], extra_body={"input_type": side})
            for text, one in zip(("ab", "abcd"), done.data, strict=True):
                with torch.inference_mode():
                    expected = tower(torch.tensor([[259, *text.encode(), 260]]))[0].tolist()
                assert one.embedding == pytest.approx(expected, abs=1e-5)


def test_a_response_in_the_background_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="computes an answer while its request is open"):
        ResponseBody.model_validate({"input": "x", "background": True})
