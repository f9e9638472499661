"""Forms of tool calls: answers as the publishers have them, streams of them, what templates write, and constraints."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.infer.chat_forms import ARGUMENTS, FORMS, FUNCTIONS, TEMPLATE, Published

from mt_core.errors import ConfigError, PluginError
from mt_core.kinds import Lazy
from mt_data.datasets.sft.chat_templates import ChatTemplate
from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_infer.chat.answer_parser import AnswerParser, AnswerPart
from mt_infer.chat.chat_format import ChatFormat
from mt_infer.chat.tool_calls.constraint import offered_calls, required_call
from mt_infer.chat.tool_calls.form import (
    TOOL_CALL_FORMS,
    CallForm,
    ToolCallFormSpec,
    form_of_template,
    registered_form,
    spec_of_template,
)
from mt_infer.chat.tool_calls.specs import FORMS as SPECS
from mt_infer.sampling.constraints import Constraints
from mt_infer.sampling.parameters import SamplingParameters

BY_NAME: dict[str, CallForm] = {spec.name: spec.form.load() for spec in SPECS}
WEATHER, NOW = ("get_weather", ARGUMENTS), ("now", {})


def test_each_form_has_a_published_example() -> None:
    assert set(FORMS) == set(BY_NAME)


def test_a_form_is_named_where_the_template_shows_none_or_another() -> None:
    assert form_of_template("{{ messages }}") is None
    assert form_of_template("{{ messages }}", name="glm") is BY_NAME["glm"]
    assert form_of_template("<tool_call>", name="glm") is BY_NAME["glm"]
    template = ChatTemplate("plain", "{{ messages[0].content }}", {}, eod_after_answer=False)
    format = ChatFormat(template, ByteLevelTokenizer(), tool_call_form="kimi_k2")
    assert format.calls is BY_NAME["kimi_k2"]
    format.close()
    with pytest.raises(PluginError, match=r"--tool-call-form=hermess .*did you mean .hermes."):
        registered_form("hermess")


def parsed(form: str, text: str, cut: int | None = None) -> AnswerPart:
    """cut: the text comes in pieces of so many characters."""
    parser = AnswerParser(BY_NAME[form], None, FUNCTIONS)
    part = AnswerPart()
    for start in range(0, len(text), cut or len(text)):
        part += parser.add(text[start : start + (cut or len(text))])
    part += parser.finish()
    return part


def calls_of(part: AnswerPart) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in part.calls]


@pytest.mark.parametrize("form", FORMS)
def test_published_answers_whole_and_as_streams(form: str) -> None:
    published = FORMS[form]
    for text, content, calls in cases(published):
        whole = parsed(form, text)
        assert (whole.content, calls_of(whole)) == (content, calls), text
        for cut in (1, 2, 7):
            assert parsed(form, text, cut) == whole, text


def cases(published: Published) -> list[tuple[str, str, list]]:
    """Answers, and the content and calls in them."""
    said = published.content
    return [
        (published.one, "", [WEATHER]),
        (published.two, "", [WEATHER, NOW]),
        (said + published.two, said, [WEATHER, NOW]),
        ("Just <text>, {no} [call]: f(x)", "Just <text>, {no} [call]: f(x)", []),
    ]


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_complete_call_is_content(form: str) -> None:
    """An answer that ends within a call, wherever: its text is content, and no call is made of a part of one."""
    published = FORMS[form]
    # What is before a message is reasoning, and white space alone is nothing.
    framed = BY_NAME[form].frame is not None
    text, first = (published.call, 3) if framed else (published.one, len(published.before) + 1)
    for end in range(first, len(text) - len(published.after) - 30, 5):
        part = parsed(form, text[:end])
        assert (part.content, part.calls) == (text[:end], []), text[:end]
        assert parsed(form, text[:end], 1) == part


def test_a_mark_within_an_argument_and_in_front_of_a_call() -> None:
    call = '<tool_call>{"name": "get_weather", "arguments": {"note": "</tool_call> or <tool_call>"}}</tool_call>'
    assert calls_of(parsed("hermes", call)) == [("get_weather", {"note": "</tool_call> or <tool_call>"})]
    call = "<tool_call><function=get_weather><parameter=note>a</parameter> b</parameter></function></tool_call>"
    assert calls_of(parsed("qwen3_coder", call, 1)) == [("get_weather", {"note": "a</parameter> b"})]
    part = parsed("qwen3_coder", "It writes <tool_call>. " + FORMS["qwen3_coder"].one, 1)
    assert (part.content, calls_of(part)) == ("It writes <tool_call>. ", [WEATHER])
    llama4 = "<|python_start|><|python_end|>" + FORMS["llama3_json"].one + "<|python_end|>"
    assert calls_of(parsed("llama3_json", llama4, 1)) == [WEATHER]
    part = parsed("kimi_k2", FORMS["kimi_k2"].one + " Done.", 3)
    assert (part.content, [call.id for call in part.calls]) == (" Done.", ["functions.get_weather:0"])


def test_calls_of_messages_that_are_no_calls_are_content_with_their_heads() -> None:
    head = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    assert parsed("harmony", f'{head}{{"note": "a').content == f'{head}{{"note": "a'
    part = parsed("harmony", f"<|channel|>final<|message|>Yes.<|end|><|start|>assistant{head}[3]<|call|>", 1)
    assert (part.content, part.calls) == (f"Yes.<|start|>assistant{head}[3]<|call|>", [])


@pytest.mark.parametrize("cut", [None, 1])
def test_calls_of_mistral_without_arguments(cut: int | None) -> None:
    """The name alone, of a function that needs no arguments."""
    for text in ("[TOOL_CALLS]now[ARGS]", "[TOOL_CALLS]now", "[TOOL_CALLS]now[ARGS]{}", "[TOOL_CALLS]now[ARGS] {}"):
        assert calls_of(parsed("mistral", text, cut)) == [NOW], text
        assert calls_of(parsed("mistral", FORMS["mistral"].call + text, cut)) == [WEATHER, NOW], text
        assert calls_of(parsed("mistral", text + FORMS["mistral"].call, cut)) == [NOW, WEATHER], text
    for text in ("[TOOL_CALLS]get_weather[ARGS]", "[TOOL_CALLS]later", "[TOOL_CALLS]no"):
        part = parsed("mistral", text, cut)
        assert (part.content, part.calls) == (text, [])


def test_a_template_that_writes_texts_alone_gets_tools_and_calls_as_texts() -> None:
    """Phi-4-mini's: functions are a text of the system message."""
    source = (
        "{%- for message in messages %}{{- '<|' + message.role + '|>' + message.content }}"
        "{%- if message.role == 'system' and message.tools %}"
        "{{- '<|tool|>' + message.tools + '<|/tool|>' }}{%- endif %}"
        "{{- '<|end|>' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
    )
    template = ChatTemplate("phi4", source, {}, eod_after_answer=False)
    chat = ChatFormat(template, ByteLevelTokenizer())
    chat._process = InProcess(template)
    tools = [{"type": "function", "function": FUNCTIONS[1]}]
    listed = json.dumps([FUNCTIONS[1]])
    first = {"role": "system", "content": "Help."}
    text = chat.text([first, *messages("phi4_mini")[:1]], tools)
    assert text == f"<|system|>Help.<|tool|>{listed}<|/tool|><|end|><|user|>Weather?<|end|><|assistant|>"
    text = chat.text(messages("phi4_mini"), tools)
    assert text.startswith(f"<|system|><|tool|>{listed}<|/tool|><|end|><|user|>Weather?<|end|><|assistant|>functools[")
    assert "<|tool|>result call_0<|end|>" in text


# -- what templates write --------------------------------------------------------------------------


def messages(form: str) -> list[dict]:
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate((WEATHER, NOW))
    ]
    # Llama 3's template takes one call a message.
    calls = calls[:1] if form == "llama3_json" else calls
    results = [{"role": "tool", "content": f"result {call['id']}", "tool_call_id": call["id"]} for call in calls]
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "Hm."},
        *results,
    ]


@cache
def template_of(form: str) -> str:
    return TEMPLATE.replace("CALLS", FORMS[form].template)


@pytest.mark.parametrize("form", FORMS)
def test_templates_write_calls_that_are_read_back(form: str) -> None:
    """The template decides the form; messages reach it in the shape that it reads."""
    source = template_of(form)
    spec = spec_of_template(source)
    assert spec is not None
    assert spec.name == form
    template = ChatTemplate(form, source, {}, eod_after_answer=False)
    chat = ChatFormat(template, ByteLevelTokenizer())
    # In this process: the text is the same, and a process for each template is slow.
    chat._process = InProcess(template)
    text = chat.text(messages(form))
    answers = [turn.partition("|")[2] for turn in text.split("<|im_start|>") if turn.startswith("assistant|")]
    written = "".join(answer.replace("<|im_end|>", "") for answer in answers)
    # LFM2's and Gemma's keys are sorted by some templates; objects are compared.
    assert calls_of(parsed(form, written)) == [WEATHER, NOW][: 1 if form == "llama3_json" else 2]
    assert text.index("result call_0") > text.index("get_weather")
    if form == "harmony":
        # A message has one call: the second one follows what the first one gave.
        assert text.index("functions.now") > text.index("result call_0")
        assert parsed(form, written).reasoning == "Hm."


class InProcess:
    """In place of a TemplateProcess."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def render(self, values: dict) -> str:
        return self._template._template.render(values, "the messages", "")[0]


# -- constraints -----------------------------------------------------------------------------------

CHOSEN = {
    "type": "object",
    "properties": {
        "days": {"enum": [1, 2]},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "deep": {"type": "object", "properties": {"on": {"type": "boolean"}}, "additionalProperties": False},
    },
    "required": ["days"],
    "additionalProperties": False,
}


def drawn(sampling: SamplingParameters, seed: int, avoided: bytes = b"") -> str:
    """A text of random bytes that the constraint allows, as a model without knowledge draws it. avoided: bytes that are
    drawn only where there are no others."""
    random = np.random.default_rng(seed)
    matcher = constraints().matcher(sampling)
    assert matcher is not None
    ids: list[int] = []
    while not matcher.is_complete and len(ids) < 600:
        allowed = np.flatnonzero(matcher.allowed((), 256).numpy())
        if not len(allowed):
            break
        # White space may go on for long.
        chosen = [token for token in allowed if token not in b" \n\t\r" + avoided]
        ids.append(int(random.choice(chosen or allowed)))
        matcher.advance(ids[-1])
    return bytes(ids).decode()


PYTHON_CALL = '[get_weather(note="Köln", days=3, deep={"on": true}, all=True)]'


@cache
def constraints() -> Constraints:
    return Constraints(ByteLevelTokenizer())


@pytest.mark.parametrize("form", FORMS)
def test_a_required_call_is_in_the_form_of_the_model(form: str) -> None:
    functions = [{"name": "f", "parameters": CHOSEN}, {"name": "g", "parameters": {**CHOSEN, "required": []}}]
    # Random letters would never end a message of reasoning, whose header has these letters.
    avoided = {"harmony": b"a", "muse_glimmer": b"s"}.get(form, b"")
    sampling = SamplingParameters(**required_call(BY_NAME[form], functions))
    for seed in range(4):
        text = drawn(sampling, seed, avoided)
        parser = AnswerParser(BY_NAME[form], None, functions)
        part = parser.add(text)
        part += parser.finish()
        ((name, arguments),) = calls_of(part)
        assert not part.content, text
        assert name in ("f", "g")
        assert set(arguments) <= set(CHOSEN["properties"])
        assert name == "g" or arguments["days"] in (1, 2)
        assert arguments.get("unit") in (None, "C", "F")
        assert arguments.get("deep") in (None, {}, {"on": True}, {"on": False})


@pytest.mark.parametrize("form", sorted({*FORMS} - {"lfm2", "pythonic", "olmo3", "mistral_list"}))
def test_answers_with_strict_functions_are_text_or_calls_of_them(form: str) -> None:
    """Of published answers, whose constraint is compiled once."""
    text = FORMS[form].one
    strict = [{**function, "strict": True} for function in FUNCTIONS]
    sampling = SamplingParameters(**offered_calls(BY_NAME[form], strict))
    assert accepted(sampling, text) is None
    if BY_NAME[form].frame is None:
        assert accepted(sampling, "Only text {, [ and <.") is None
    wrong = text.replace("days: 3", "days: x") if "days: 3" in text else text.replace("3", "x", 1)
    assert (accepted(sampling, wrong) or len(text)) <= text.encode().index(b"3")
    unknown = text.replace("get_weather", "get_money")
    assert accepted(sampling, unknown) is not None


def accepted(sampling: SamplingParameters, text: str) -> int | None:
    """Bytes of the text that an answer may begin with; None: all, and it may end there."""
    matcher = constraints().matcher(sampling)
    assert matcher is not None
    count = matcher._matcher.try_consume_tokens(list(text.encode()))
    return None if count == len(text.encode()) and matcher._matcher.is_accepting() else count


@pytest.mark.parametrize(("form", "call"), [("lfm2", PYTHON_CALL), ("pythonic", PYTHON_CALL)])
def test_strict_calls_in_python(form: str, call: str) -> None:
    strict = [{**function, "strict": True} for function in FUNCTIONS]
    sampling = SamplingParameters(**offered_calls(BY_NAME[form], strict))
    before, after = ("<|tool_call_start|>", "<|tool_call_end|>") if form == "lfm2" else ("", "")
    assert accepted(sampling, f"{before}{call}{after}") is None
    assert accepted(sampling, f"{before}{call.replace('days=3', 'days=x')}{after}") == len(
        before
    ) + call.encode().index(b"3")
    assert accepted(sampling, f"{before}{call.replace('True', '1')}{after}") is not None


def test_the_form_that_the_page_of_plugins_declares_is_read_and_written() -> None:
    page = Path(__file__).parents[2] / "docs/guides/plugins.md"
    (block,) = (block for block in page.read_text().split("```") if "PIPED = CallForm" in block)
    names: dict = {}
    exec(block.removeprefix("python"), names)
    parser = AnswerParser(names["PIPED"], None, FUNCTIONS)
    part = parser.add('Well. <call>now|{}</call><call>get_weather|{"days": 3}</call>')
    part += parser.finish()
    assert (part.content, calls_of(part)) == ("Well. ", [NOW, ("get_weather", {"days": 3})])
    required = SamplingParameters(**required_call(names["PIPED"], FUNCTIONS))
    assert accepted(required, "<call>now|{}</call>") is None
    assert accepted(required, "<call>later|{}</call>") is not None
    spec = ToolCallFormSpec(name="piped", doc="", marks=(("<call>",),), form=Lazy("my_forms.forms:PIPED"))
    known: Any = {TOOL_CALL_FORMS: [*SPECS, spec]}
    assert spec_of_template("write <call>f|{}</call>", known) is spec


@pytest.mark.parametrize("form", ["qwen3_coder", "glm", "minimax_m2", "minimax_m3", "deepseek_v32"])
def test_texts_of_strict_functions_are_listed_or_refused(form: str) -> None:
    def grammar(schema: dict[str, Any], *, strict: bool = True) -> str:
        parameters = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
        return required_call(BY_NAME[form], [{"name": "f", "strict": strict, "parameters": parameters}])["grammar"]

    for schema in (
        {"type": "string", "pattern": "^[0-9]{3}$"},
        {"type": ["string", "null"], "maxLength": 3},
        {"type": "string", "format": "date"},
        {"anyOf": [{"type": "string", "enum": ["p"]}, {"type": "integer"}]},
    ):
        with pytest.raises(ConfigError, match="function f, argument v: .* not constrained by"):
            grammar(schema)
        assert grammar(schema, strict=False)
    listed = grammar({"type": ["string", "null"], "enum": ["a", 3, None]})
    assert '("a" | "3" | "null")' in listed
    assert grammar({"anyOf": [{"type": "string"}, {"type": "null"}]})
