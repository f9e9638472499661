"""PUT /api as Megatron's text_generation_cli asks it, and each of its fields."""

from __future__ import annotations

import json
import urllib.request

import pytest
import torch
from tests.infer.server.served import Live, generator, language_model, live, scripted_model

from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.server.megatron import MegatronBody, _sampling, _stops


@pytest.fixture(scope="module")
def megatron():
    with live([language_model("tiny", 1)]) as found:
        yield found


@pytest.fixture(scope="module")
def tiny():
    return generator(1)


def ask(megatron: Live, **fields: object) -> dict:
    status, answer = megatron.call("/api", {"prompts": ["The"], "tokens_to_generate": 6, **fields}, method="PUT")
    assert status == 200, answer
    return answer


def test_megatrons_client(megatron: Live, tiny) -> None:
    """What tools/text_generation_cli.py sends, and reads."""
    data = {"prompts": ["The"], "tokens_to_generate": 8, "top_k": 1}
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    request = urllib.request.Request(f"{megatron.url}/api", json.dumps(data).encode(), headers, method="PUT")
    with urllib.request.urlopen(request, timeout=30) as response:
        text = json.load(response)["text"][0]
    greedy = tiny.generate(["The"], SamplingParameters(temperature=0.0, max_tokens=8))[0][0].text
    assert text == "The" + greedy
    status, answer = megatron.call("/api", {}, method="PUT")
    assert (status, "prompts" in answer["message"]) == (400, True)


def test_log_probabilities_of_prompt_and_continuation(megatron: Live, tiny) -> None:
    answer = ask(megatron, logprobs=True, random_seed=3)
    ids = answer["tokens"][0]
    with torch.inference_mode():
        logs = tiny.model(torch.tensor([ids])).float().log_softmax(-1)[0]
    expected = [logs[place, token].item() for place, token in enumerate(ids[1:])]
    assert answer["logprobs"][0] == pytest.approx(expected, abs=1e-4)
    assert "".join(answer["segments"][0]) == answer["text"][0]
    scored = ask(megatron, prompts=[answer["text"][0]], tokens_to_generate=0, logprobs=True)
    assert len(scored["tokens"][0]) == len(scored["logprobs"][0]) + 1
    assert scored["text"] == answer["text"]


def test_fields_are_honoured(megatron: Live, tiny) -> None:
    assert ask(megatron, random_seed=3) == ask(megatron, random_seed=3, no_log=True, top_p=1.0)
    assert ask(megatron, random_seed=3)["text"] != ask(megatron, random_seed=4)["text"]
    assert ask(megatron)["logprobs"] is None
    eod = tiny.tokenizer.special.eod
    assert ask(megatron, add_BOS=True)["tokens"][0][:2] == [eod, ord("T")]
    assert len(ask(megatron, prompts=["", "ab"], add_BOS=True)["text"]) == 2
    free = ask(megatron, random_seed=3)["tokens"][0]
    assert ask(megatron, random_seed=3, stop_token=free[5])["tokens"][0] == free[: free.index(free[5], 3)]


def test_a_line_end_stops_the_text_and_stays_in_it(tiny) -> None:
    assert _stops(MegatronBody(prompts=["x"], stop_on_eol=True)) == ("\n",)
    assert _stops(MegatronBody(prompts=["x"], stop_on_eol=True, stop_on_double_eol=True)) == ("\n\n",)
    with live([scripted_model("one\n")]) as served:
        status, answer = served.call("/api", {"prompts": ["zero "], "stop_on_eol": True}, method="PUT")
        assert (status, answer["text"]) == (200, ["zero one\n"])


def test_beams_are_answered_with_scores(megatron: Live, tiny) -> None:
    answer = ask(megatron, beam_width=3, length_penalty=1.5, logprobs=True)
    sampling = SamplingParameters(num_beams=3, n=3, max_tokens=6, length_penalty=1.5)
    beams = tiny.generate(["The"], sampling)[0]
    assert answer["text"] == ["The" + one.text for one in beams]
    assert answer["scores"] == pytest.approx([one.score for one in beams], abs=1e-5)
    assert answer["scores"] == sorted(answer["scores"], reverse=True)
    # Of the two tokens of the prompt behind its first, and of six generated ones, whose sum is the score's.
    assert {len(row) for row in answer["logprobs"]} == {2 + 6}
    sums = [sum(row[2:]) / 6**1.5 for row in answer["logprobs"]]
    assert sums == pytest.approx(answer["scores"], abs=1e-5)


def test_a_newline_after_a_colon_can_be_prevented(megatron: Live) -> None:
    model = megatron.service.models.find(None)
    sampled = [
        _sampling(model, MegatronBody(prompts=["x"], prevent_newline_after_colon=on), [[1]]) for on in (False, True)
    ]
    assert [one.bad_words_ids for one in sampled] == [(), ((ord(":"), ord("\n")),)]
    assert ask(megatron, prompts=["so:"], prevent_newline_after_colon=True)["text"][0].startswith("so:")


REFUSED = [
    ({"prompts": []}, "prompts"),
    ({"prompts": "text"}, "list"),
    ({"prompts": ["x"] * 129}, "128"),
    ({"prompts": [""]}, "add_BOS"),
    ({"max_len": 3}, "replace it with tokens_to_generate"),
    ({"sentences": ["x"]}, "replace it with prompts"),
    ({"tokens_to_generate": 0}, "logprobs=true"),
    ({"tokens_to_generate": 300}, "context is 256"),
    ({"temperature": 0.0}, "greater than 0"),
    ({"temperature": 101.0}, "100"),
    ({"top_k": 1001}, "1000"),
    ({"top_k": 5, "top_p": 0.5}, "cannot be used together"),
    ({"random_seed": -2}, "-1"),
    ({"prompts": ["x", "y"], "beam_width": 2}, "one prompt"),
    ({"length_penalty": 2.0}, "beam_width"),
    ({"length_penalty": 1e308, "beam_width": 2}, "from -30 to 30"),
    ({"beam_width": 2, "top_k": 5}, "beam search"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_is_refused(megatron: Live, fields: dict, words: str) -> None:
    status, answer = megatron.call("/api", {"prompts": ["x"], **fields}, method="PUT")
    assert status == 400
    assert words in answer["message"]
