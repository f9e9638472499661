"""Calls of LFM2.5, whose template writes texts without escapes: read whole, as streams, and through the server."""

from __future__ import annotations

import json

import pytest
from tests.infer.server.served import live, openai_client, scripted_model
from tests.infer.test_tool_call_forms import InProcess, calls_of, parsed

from mt_data.datasets.sft.chat_templates import ChatTemplate
from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_infer.chat.chat_format import ChatFormat
from mt_infer.chat.tool_calls.form import spec_of_template

NOTE = "It's \"cold\", isn't it? (yes)\nSo: C:\\x"
TEMPLATE = """{%- macro written(value) -%}
{%- if value is string -%}{{ "'" + value + "'" }}{%- elif value is mapping -%}{{ value | tojson }}
{%- else -%}{{ value | string }}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}{{ "<|im_start|>system\\nList of tools: [" }}
{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}{{ "]<|im_end|>\\n" }}{%- endif -%}
{%- for message in messages -%}{{ "<|im_start|>" + message.role + "\\n" + (message.content or "") }}
{%- if message.tool_calls -%}{{ "<|tool_call_start|>[" }}
{%- for call in message.tool_calls -%}{{ call.function.name + "(" }}
{%- for name, value in call.function.arguments.items() -%}{{ name + "=" + written(value) }}
{{- ", " if not loop.last }}{%- endfor -%}{{ ")" }}{{ ", " if not loop.last }}{%- endfor -%}
{{- "]<|tool_call_end|>" }}{%- endif -%}{{ "<|im_end|>\\n" }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\\n" }}{%- endif -%}"""
"""What is not a text is written as JSON or as Python writes it."""
ARGUMENTS = {
    "note": NOTE,
    "from": "a",
    "days": 3,
    "deep": {"on": True, "list": [None, "x)"]},
    "all": False,
    "l": [1, "y"],
}
FIRST, SECOND = ("get-weather", ARGUMENTS), ("now", {})
WRITTEN = (
    f"<|tool_call_start|>[get-weather(note='{NOTE}', from='a', days=3, "
    """deep={"on": true, "list": [null, "x)"]}, all=False, l=[1, 'y']), now()]<|tool_call_end|>"""
)


def test_the_template_of_lfm2_5_writes_calls_that_are_read_back() -> None:
    spec = spec_of_template(TEMPLATE)
    assert spec is not None
    assert spec.name == "lfm2"
    template = ChatTemplate("lfm2.5", TEMPLATE, {}, eod_after_answer=False)
    chat = ChatFormat(template, ByteLevelTokenizer())
    chat._process = InProcess(template)
    calls = [{"type": "function", "function": {"name": name, "arguments": of}} for name, of in (FIRST, SECOND)]
    text = chat.text([{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}])
    assert WRITTEN in text
    assert calls_of(parsed("lfm2", WRITTEN)) == [FIRST, SECOND]


@pytest.mark.parametrize("cut", [None, 1, 7])
@pytest.mark.parametrize(
    ("inside", "calls"),
    [
        ("f(x='it's, ok', y=2), g(z='a')", [("f", {"x": "it's, ok", "y": 2}), ("g", {"z": "a"})]),
        ("f(class='a', x=007, y=-0.5)", [("f", {"class": "a", "x": 7, "y": -0.5})]),
        (
            'grocery.order-all(x="he said "hi"", y=[1, "b,c)"])',
            [("grocery.order-all", {"x": 'he said "hi"', "y": [1, "b,c)"]})],
        ),
        ("f(x='two\nlines')", [("f", {"x": "two\nlines"})]),
        # Escapes of Python count where the text is one of Python's.
        (r"f(from='a\tb')", [("f", {"from": "a\tb"})]),
    ],
)
def test_calls_that_python_does_not_parse(inside: str, calls: list, cut: int | None) -> None:
    part = parsed("lfm2", f"Well. <|tool_call_start|>[{inside}]<|tool_call_end|> Done.", cut)
    assert (part.content, calls_of(part)) == ("Well.  Done.", calls)


@pytest.mark.parametrize(
    "inside", ["f(x=)", "f(x='a' y=1)", "f('a')", "f(x=a)", "f(x='a", "no call", "f(x='it's', y=open)"]
)
def test_what_is_no_call_is_content(inside: str) -> None:
    text = f"<|tool_call_start|>[{inside}]<|tool_call_end|>"
    part = parsed("lfm2", text, 1)
    assert (part.content, part.calls) == (text, [])


def test_a_client_gets_the_calls_whole_and_streamed() -> None:
    template = ChatTemplate("lfm2.5", TEMPLATE, {}, eod_after_answer=False)
    chat = ChatFormat(template, ByteLevelTokenizer())
    try:
        with live([scripted_model("So.\n" + WRITTEN, chat=chat)]) as served:
            client = openai_client(served)
            tools = [
                {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("get-weather", "now")
            ]
            asked = {"model": "scripted", "messages": [{"role": "user", "content": "?"}], "tools": tools}
            whole = client.chat.completions.create(**asked).choices[0]
            with client.chat.completions.stream(**asked) as stream:
                streamed = stream.get_final_completion().choices[0]
    finally:
        chat.close()
    for choice in (whole, streamed):
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "So.\n")
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        assert calls == [FIRST, SECOND]
