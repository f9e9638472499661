"""Tool calls: found in answers, given to templates."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from tests.infer.server.served import chat_format, generator, live, openai_client, scripted_model

from mt_core.errors import DataError
from mt_data.datasets.sft.chat_templates import ChatTemplate
from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_infer.chat.answer_parser import AnswerParser
from mt_infer.chat.chat_format import ChatFormat
from mt_infer.chat.tool_calls.constraint import offered_calls
from mt_infer.chat.tool_calls.form import CallForm, spec_of_template
from mt_infer.chat.tool_calls.specs import FORMS
from mt_infer.sampling.constraints import Constraints
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.server.served_model import ServedModel

BY_NAME: dict[str, CallForm] = {spec.name: spec.form.load() for spec in FORMS}
HERMES = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TWO = HERMES + '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Köln"}}'
WEATHER, TIME = ("weather", {"city": "Köln"}), ("time", {})
CASES = [
    ("hermes", HERMES, "Let me see.\n", [WEATHER]),
    ("hermes", TWO, "Let me see.\n", [WEATHER, TIME]),
    ("hermes", "no <tool is called", "no <tool is called", []),
    ("hermes", HERMES[:-20], HERMES[:-20], []),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    ("llama3_json", LLAMA, "", [WEATHER]),
    ("llama3_json", "<|python_tag|>" + LLAMA + '; {"name": "time", "parameters": {}}', "", [WEATHER, TIME]),
    ("llama3_json", '{"city": "Köln"}', '{"city": "Köln"}', []),
    ("llama3_json", "It is {warm}.", "It is {warm}.", []),
    ("llama3_json", LLAMA[:-3], LLAMA[:-3], []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_calls_are_found_however_the_text_comes(form, text, content, calls, cuts) -> None:
    parser = AnswerParser(BY_NAME[form])
    bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    parts = [parser.add(text[start:end]) for start, end in zip(bounds, bounds[1:], strict=False)] + [parser.finish()]
    assert "".join(part.content for part in parts) == content
    assert [(call.name, json.loads(call.arguments)) for part in parts for call in part.calls] == calls


QWEN = """{%- if tools %}<|im_start|>system
# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]
MESSAGES = [
    {"role": "user", "content": "Weather in Köln?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}],
    },
    {"role": "tool", "content": "rain", "tool_call_id": "1"},
]


@pytest.fixture(scope="module")
def qwen():
    chat = ChatFormat(ChatTemplate("qwen", QWEN, {}, eod_after_answer=False), ByteLevelTokenizer())
    yield chat
    chat.close()


SYSTEM = """<|im_start|>system
# Tools
<tools>{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": \
{"city": {"type": "string"}}}}}</tools>
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
""".replace("\\\n", "")
TURNS = """<|im_start|>user
Weather in Köln?<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "weather", "arguments": {"city": "Köln"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
rain
</tool_response><|im_end|>
<|im_start|>assistant
"""


def test_templates_get_tools_and_calls(qwen: ChatFormat) -> None:
    assert bytes(qwen.prompt(MESSAGES)).decode() == TURNS
    assert bytes(qwen.prompt(MESSAGES, TOOLS)).decode() == SYSTEM + TURNS


def test_options_of_the_template_are_honoured_or_refused(qwen: ChatFormat) -> None:
    asked = qwen.text(MESSAGES[:1], None, {"add_generation_prompt": False, "enable_thinking": True})
    assert asked == qwen.text(MESSAGES[:1]).removesuffix("<|im_start|>assistant\n")
    for name in ("messages", "tools", "self", "strftime_now"):
        with pytest.raises(DataError, match=f'chat_template_kwargs: the template has "{name}" from elsewhere'):
            qwen.text(MESSAGES[:1], None, {name: []})


def test_the_form_of_calls_and_the_end_of_answers_are_the_templates(qwen: ChatFormat) -> None:
    assert spec_of_template(QWEN).name == "hermes"
    assert spec_of_template("{{ messages }}") is None
    assert spec_of_template('"parameters" ipython').name == "llama3_json"
    assert (qwen.stop, qwen.stop_token_ids) == (("<|im_end|>",), ())  # bytes: the mark is no single id


def test_the_client_gets_tool_calls(qwen: ChatFormat) -> None:
    with live([scripted_model(TWO, chat=qwen)]) as served:
        client = openai_client(served)
        asked = {"model": "scripted", "messages": [{"role": "user", "content": "Weather?"}], "tools": TOOLS}
        choice = client.chat.completions.create(**asked).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see.\n"
        found = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        assert found == [WEATHER, TIME]
        with client.chat.completions.stream(**asked) as stream:
            final = stream.get_final_completion().choices[0]
        streamed = [(call.function.name, json.loads(call.function.arguments)) for call in final.message.tool_calls]
        assert (streamed, final.finish_reason) == (found, "tool_calls")
        # The answer's own calls, sent back, are what the template writes.
        back = [asked["messages"][0], choice.message.model_dump(exclude_none=True), {"role": "tool", "content": "rain"}]
        assert client.chat.completions.create(**{**asked, "messages": back}).usage.prompt_tokens > 200
        without = client.chat.completions.create(**{**asked, "tool_choice": "none"}).choices[0]
        assert (without.message.content, without.message.tool_calls) == (TWO, None)


def accepted(form: str, text: str) -> int | None:
    """Bytes of the text that an answer with the tool f, which is strict, and the tool g may begin with; None: all, and
    it may end there."""
    parameters = {"type": "object", "properties": {"days": {"enum": [1, 2]}}, "additionalProperties": False}
    functions = [{"name": "f", "strict": True, "parameters": parameters}, {"name": "g", "parameters": parameters}]
    sampling = SamplingParameters(**offered_calls(BY_NAME[form], functions))
    matcher = Constraints(ByteLevelTokenizer()).matcher(sampling)._matcher
    count = matcher.try_consume_tokens(list(text.encode()))
    return None if count == len(text.encode()) and matcher.is_accepting() else count


F, G = (json.dumps({"name": name, "arguments": {"days": days}}) for name, days in (("f", 2), ("g", 7)))
STRICT = [
    ("hermes", "just <text {", None),
    ("hermes", f"Well: <tool_call>\n{F}\n</tool_call>\n<tool_call>{G}</tool_call>", None),
    ("hermes", f"<tool_call>{F.replace('2', '7')}</tool_call>", len('<tool_call>{"name": "f", "arguments": {"days": ')),
    ("hermes", "<tool_call>no call", len("<tool_call>")),
    ("hermes", f"<tool_call>{F}</tool_call> more", len(f"<tool_call>{F}</tool_call> ")),
    ("llama3_json", "just <text {", None),
    ("llama3_json", f"{F}; {G}".replace("arguments", "parameters"), None),
    (
        "llama3_json",
        F.replace("arguments", "parameters").replace("2", "7"),
        len('{"name": "f", "parameters": {"days": '),
    ),
]


@pytest.mark.parametrize(("form", "text", "expected"), STRICT)
def test_calls_of_strict_tools_have_their_arguments(form: str, text: str, expected: int | None) -> None:
    assert accepted(form, text) == expected


def test_strict_tools_and_single_calls_as_the_client_sends_them(qwen: ChatFormat) -> None:
    """The grammar of strict tools is part of the sampling, and further calls are left out."""
    with live([scripted_model(TWO, chat=qwen)]) as served:
        seen = []
        submit, generator = (
            served.service.models.find(None).generator.submit,
            served.service.models.find(None).generator,
        )
        generator.submit = lambda prompt, sampling, inputs, adapter: (
            seen.append(sampling) or submit(prompt, sampling, inputs)
        )
        import openai

        client = openai_client(served)
        tool = openai.pydantic_function_tool(Weather, name="weather")
        asked = {"model": "scripted", "messages": [{"role": "user", "content": "?"}], "tools": [tool]}
        (call,) = client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0].message.tool_calls
        assert call.function.name == "weather"
        assert '"weather"' in seen[0].grammar
        with pytest.raises(openai.BadRequestError, match="leave out response_format"):
            client.chat.completions.create(**asked, response_format={"type": "json_object"})


class Weather(BaseModel):
    city: str


@pytest.mark.slow
@pytest.mark.parametrize("form", ["hermes", "llama3_json", "qwen3_coder"])
def test_a_required_call_is_made_by_any_model(form: str) -> None:
    """Random weights, held to the form of a call."""
    chat = chat_format()
    chat.calls = BY_NAME[form]
    with live([ServedModel("tiny", 0, generator(1), chat=chat)]) as served:
        client = openai_client(served)
        parameters = {
            "type": "object",
            "properties": {"days": {"enum": [1, 2]}},
            "required": ["days"],
            "additionalProperties": False,
        }
        tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("f", "g")]
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "seed": 1}
        text = chat.text
        chat.text = lambda messages, tools, options: text(messages, None, options)  # chatml refuses tools
        for choice in ("required", {"type": "function", "function": {"name": "g"}}):
            answer = client.chat.completions.create(**asked, tools=tools, tool_choice=choice).choices[0]
            (call,) = answer.message.tool_calls
            assert answer.finish_reason == "tool_calls"
            assert call.function.name in ("f", "g") if choice == "required" else call.function.name == "g"
            assert json.loads(call.function.arguments)["days"] in (1, 2)
        missing = {"type": "function", "function": {"name": "h"}}
        import openai

        with pytest.raises(openai.BadRequestError, match='no tool is named "h"'):
            client.chat.completions.create(**asked, tools=tools, tool_choice=missing)
        with pytest.raises(openai.BadRequestError, match='two functions are named \\\\?"f"'):
            client.chat.completions.create(**asked, tools=[*tools, tools[0]])
        with pytest.raises(openai.BadRequestError, match='two functions are named \\\\?"f"'):
            client.responses.create(
                model="tiny", input="?", tools=[{"type": "function", "name": "f", "parameters": parameters}] * 2
            )
