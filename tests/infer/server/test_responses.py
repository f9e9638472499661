"""/v1/responses, judged by the `openai` client: its types, its streams, and its helper that puts events together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel, ConfigDict
from tests.infer.server.served import Live, chat_format, live, openai_client, scripted_model
from tests.infer.server.test_tools import HERMES, QWEN

from mt_data.datasets.sft.chat_templates import ChatTemplate
from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_infer.chat.chat_format import ChatFormat
from mt_infer.server.options import ServerOptions

if TYPE_CHECKING:
    import openai

ASKED: dict[str, Any] = {"model": "alpha", "temperature": 0, "max_output_tokens": 8}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}


@pytest.fixture(scope="module")
def client(served: Live) -> openai.OpenAI:
    import openai

    # What does not validate against the client's types is an error of this server.
    return openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60, _strict_response_validation=True
    )


def chat_text(served: Live, messages: list[dict[str, Any]]) -> str:
    body = {"model": "alpha", "messages": messages, "temperature": 0, "max_tokens": 8}
    return served.call("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]


def test_a_response_is_the_chat_of_its_items(client: openai.OpenAI, served: Live) -> None:
    plain = [{"role": "user", "content": "hi"}]
    found = client.responses.create(**ASKED, input="hi")
    assert found.output_text == chat_text(served, plain)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (found.usage.output_tokens, found.usage.total_tokens) == (8, found.usage.input_tokens + 8)
    system = [{"role": "system", "content": "be brief"}, *plain]
    assert client.responses.create(**ASKED, input="hi", instructions="be brief").output_text == chat_text(
        served, system
    )
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        *[one.model_dump() for one in found.output],
        {"type": "message", "role": "user", "content": "more"},
    ]
    turns = [
        {"role": "developer", "content": "be brief"},
        *plain,
        {"role": "assistant", "content": found.output_text},
        {"role": "user", "content": "more"},
    ]
    assert client.responses.create(**ASKED, input=items).output_text == chat_text(served, turns)


def test_a_conversation_goes_on_from_a_stored_response(client: openai.OpenAI, served: Live) -> None:
    import openai

    first = client.responses.create(**ASKED, input="hi", instructions="of this turn alone")
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "more"},
    ]
    second = client.responses.create(**ASKED, input="more", previous_response_id=first.id)
    assert second.output_text == chat_text(served, turns)
    assert client.responses.retrieve(second.id).output == second.output
    client.responses.delete(first.id)
    passing = client.responses.create(**ASKED, input="hi", store=False)
    for missing in (first.id, passing.id):
        with pytest.raises(openai.NotFoundError, match="store=true"):
            client.responses.retrieve(missing)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(**ASKED, input="more", previous_response_id=missing)


def test_a_stream_comes_to_the_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASKED, input="hi")
    events = list(client.responses.create(**ASKED, input="hi", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]  # fmt: skip
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done",
                          "response.incomplete"]  # fmt: skip
    assert "".join(event.delta for event in events if event.type.endswith("delta")) == whole.output_text
    assert events[-1].response.usage == whole.usage
    asked = {**ASKED, "input": "hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    events = list(client.responses.create(**asked, stream=True))
    entries = events[-1].response.output[0].content[0].logprobs
    assert [len(entry.top_logprobs) for entry in entries] == [2] * 8
    assert [entry for event in events if event.type.endswith("delta") for entry in event.logprobs] != []


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    yes: bool


@pytest.mark.slow
def test_text_is_parsed_by_its_format(client: openai.OpenAI) -> None:
    found = client.responses.parse(model="alpha", input="hi", text_format=Answer, extra_body={"seed": 2})
    assert isinstance(found.output_parsed, Answer)


def test_calls_of_functions_are_items() -> None:
    template = ChatTemplate("qwen", QWEN, {}, eod_after_answer=False)
    chat = ChatFormat(template, ByteLevelTokenizer())
    model = scripted_model(HERMES, chat=chat)
    with live([model]) as served:
        client = openai_client(served)
        asked: dict[str, Any] = {"model": "scripted", "input": "Weather in Köln?", "tools": [TOOL]}
        found = client.responses.create(**asked)
        message, call = found.output
        assert (message.content[0].text, call.type, call.name) == ("Let me see.\n", "function_call", "weather")
        assert call.arguments == '{"city": "Köln"}'
        assert found.status == "completed"
        with client.responses.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert [one.type for one in final.output] == ["message", "function_call"]
        assert final.output[1].arguments == call.arguments
        assert kinds.count("response.output_item.done") == 2
        # The call and what it gave are the next turn's items.
        items = [
            {"role": "user", "content": asked["input"]},
            *[one.model_dump(exclude_none=True) for one in found.output],
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
        ]
        again = client.responses.create(**{**asked, "input": items, "store": False})
        assert again.output[1].name == "weather"
        turn = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        assert client.responses.create(**{**asked, "input": [turn]}, previous_response_id=found.id).output
        named = {**asked, "tool_choice": {"type": "function", "name": "clock"}}
        status, answer = served.call("/v1/responses", named)
        assert (status, "clock" in answer["error"]["message"]) == (400, True)


def test_an_error_within_a_stream_is_a_failed_response() -> None:
    with live([scripted_model("ab", forever=True, chat=chat_format())], ServerOptions(request_seconds=0.5)) as served:
        *_, last = openai_client(served).responses.create(model="scripted", input="x", stream=True)
        assert (last.type, "0.5 s" in last.response.error.message) == ("response.failed", True)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": "x", "conversation": "c"}, "conversation: this server keeps no conversations"),
    ({"input": "x", "background": True}, "background"),
    ({"input": "x", "truncation": "auto"}, "truncation"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
    ({"input": "x", "max_output_tokens": 999}, "context is 256"),
]


@pytest.mark.parametrize(("changed", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_a_response_cannot_be_is_refused(served: Live, changed: dict[str, Any], words: str) -> None:
    status, answer = served.call("/v1/responses", {"model": "alpha", **changed})
    assert (status, words in answer["error"]["message"]) == (400, True), answer
    status, answer = served.call("/v1/responses", {"model": "alpha", **changed, "stream": True})
    assert status == 400
