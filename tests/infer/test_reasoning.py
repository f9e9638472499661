"""What a model thinks before it answers: divided from the answer, constrained around, shown and sent back."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tests.infer.chat_forms import FORMS, FUNCTIONS
from tests.infer.server.served import live, openai_client, scripted_model

from mt_data.datasets.sft.chat_templates import ChatTemplate
from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_infer.chat.answer_parser import AnswerParser, AnswerPart
from mt_infer.chat.chat_format import ChatFormat
from mt_infer.chat.conversation import Conversation
from mt_infer.chat.history import SHAPES, CallShape, shaped_history
from mt_infer.chat.partners import ReasoningText
from mt_infer.chat.reasoning import MARKS, THINK, ReasoningMarks, is_open, reasoning_key, reasoning_of_template
from mt_infer.chat.tool_calls.code_forms import LFM2
from mt_infer.chat.tool_calls.constraint import AnswerBeginning, behind_reasoning, required_call
from mt_infer.chat.tool_calls.form import CallForm, nine_letters
from mt_infer.chat.tool_calls.framed_forms import HARMONY, MUSE
from mt_infer.chat.tool_calls.json_forms import HERMES, KIMI_K2, MISTRAL
from mt_infer.sampling.constraints import Constraints
from mt_infer.sampling.parameters import SamplingParameters

MISTRAL_MARKS, GEMMA_MARKS = MARKS[3], MARKS[4]
ERNIE = ReasoningMarks("<think>", "</think>", ("<response>", "</response>"))
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
CASES: list[tuple[CallForm | None, ReasoningMarks | None, bool, str, str, str]] = [
    (None, THINK, False, "<think>\nHm.\n\nSo.\n</think>\n\nYes.\n", "Hm.\n\nSo.", "Yes.\n"),
    (None, THINK, True, "Hm.\n</think>\n\nYes <think>.", "Hm.", "Yes <think>."),
    (None, THINK, False, "\n<think></think>Yes.", "", "Yes."),
    (None, THINK, False, "<think>Hm </thin", "Hm </thin", ""),
    (None, THINK, False, "<thinking> <think>Hm</think>", "", "<thinking> <think>Hm</think>"),
    (None, MISTRAL_MARKS, False, "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    (None, GEMMA_MARKS, False, "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
    (None, ERNIE, True, "Hm.\n</think>\n\n<response>\nYes.\n\nNo.\n</response>\n", "Hm.", "Yes.\n\nNo."),
    (None, ERNIE, True, "Hm.\n</think>\n\nYes.\n", "Hm.", "Yes."),
    (HERMES, THINK, False, f"<think>{CALL}</think>Yes.", CALL, "Yes."),
    (HARMONY, None, False, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
     "<|message|>Wait.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>", "Hm.", "Wait.\n\nYes."),
    (HARMONY, None, False, "Yes <b>.", "", "Yes <b>."),
    (HARMONY, None, False, "<|channel|>final<|message|>Yes <|", "", "Yes <|"),
    (MUSE, None, False, " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.", "Hm.", "Yes."),
]  # fmt: skip


@pytest.mark.parametrize(("form", "marks", "is_thinking", "text", "reasoning", "content"), CASES)
def test_reasoning_is_divided_from_what_is_said(form, marks, is_thinking, text, reasoning, content) -> None:
    for cut in (len(text), 1, 3):
        parser = AnswerParser(form, marks, FUNCTIONS, is_thinking=is_thinking)
        part = AnswerPart()
        for start in range(0, len(text), cut):
            part += parser.add(text[start : start + cut])
        part += parser.finish()
        assert (part.reasoning, part.content, part.calls) == (reasoning, content, [])


def test_templates_show_marks_and_names_of_reasoning() -> None:
    qwen = "{%- if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>{% endif %}"
    assert (reasoning_of_template(qwen), reasoning_key(qwen)) == (THINK, "reasoning_content")
    assert reasoning_of_template("{{ content.split('</think>')[-1] }}<response></response>") == ERNIE
    assert reasoning_of_template("<|channel>thought\n<channel|>") == GEMMA_MARKS
    assert reasoning_of_template("<mm:think></mm:think> <think></think>") == MARKS[0]
    assert reasoning_of_template("{{ messages }}") is None
    assert reasoning_key("{% if message.thinking %}") == "thinking"
    assert reasoning_key("{% set r = message['reasoning'] %}") == "reasoning"
    assert reasoning_key("{% if enable_thinking %}<think>") is None
    assert is_open("<|im_start|>assistant\n<think>\n", THINK)
    assert not is_open("<|im_start|>assistant\n<think>\n\n</think>\n\n", THINK)


# -- what messages become ---------------------------------------------------------------------------


def history(form: CallForm | None, shape: CallShape, key: str | None, ids: Sequence[str]) -> list[Any]:
    calls = [{"id": number, "function": {"name": f"f{number}", "arguments": {"x": 1}}} for number in ids]
    answer = {"role": "assistant", "content": "Wait.", "tool_calls": calls, "reasoning_content": "Hm."}
    results = [{"role": "tool", "content": number, "tool_call_id": number} for number in ids]
    return shaped_history([answer, *results, {"role": "assistant", "content": "Yes."}], shape, key, form)


def test_earlier_calls_have_the_shape_that_a_template_reads() -> None:
    answer, result, *_ = history(None, SHAPES[3], None, ["1"])
    assert answer["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'
    assert "reasoning_content" not in answer
    assert result == {"role": "tool", "content": "1", "tool_call_id": "1", "name": "f1"}
    answer, first, second, _ = history(KIMI_K2, SHAPES[0], "reasoning_content", ["call_a", "call_b"])
    assert [call["id"] for call in answer["tool_calls"]] == ["functions.fcall_a:0", "functions.fcall_b:1"]
    assert (first["tool_call_id"], second["tool_call_id"]) == ("functions.fcall_a:0", "functions.fcall_b:1")
    assert (answer["reasoning_content"], answer["content"]) == ("Hm.", "Wait.")
    answer, result, *_ = history(MISTRAL, SHAPES[0], None, ["call_0123456789"])
    assert answer["tool_calls"][0]["id"] == result["tool_call_id"] == "123456789"
    assert re.fullmatch("[a-z0-9A-Z]{9}", nine_letters("f", 0, None))
    assert history(HARMONY, SHAPES[0], "thinking", ["a", "b"]) == [
        {"role": "assistant", "content": "", "thinking": "Hm.\n\nWait.", "tool_calls": [named("a")]},
        {"role": "tool", "content": "a", "tool_call_id": "a", "name": "fa"},
        {"role": "assistant", "content": "", "tool_calls": [named("b")]},
        {"role": "tool", "content": "b", "tool_call_id": "b", "name": "fb"},
        {"role": "assistant", "content": "Yes."},
    ]


def test_calls_stay_in_their_order_whatever_that_of_their_results() -> None:
    calls = [named(number) for number in ("a", "b")]
    answer = {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "Hm."}
    results = [{"role": "tool", "content": number, "tool_call_id": number} for number in ("b", "a")]
    shaped = shaped_history([answer, *results], SHAPES[0], "thinking", HARMONY)
    assert [message.get("tool_call_id", "call") for message in shaped] == ["call", "a", "call", "b"]
    assert shaped[0]["thinking"] == "Hm."
    nameless = [{"role": "tool", "content": text} for text in ("first", "second")]
    shaped = shaped_history([answer, *nameless], SHAPES[0], "thinking", HARMONY)
    assert [message["content"] for message in shaped] == ["", "first", "", "second"]


def named(number: str) -> dict[str, Any]:
    return {"id": number, "function": {"name": f"f{number}", "arguments": {"x": 1}}}


# -- constraints -----------------------------------------------------------------------------------


def accepted(constraint: dict[str, Any], text: str | Sequence[int], tokenizer: Any = None) -> bool:
    """Whether a text is a whole answer."""
    given = {name: value for name, value in constraint.items() if value is not None}
    matcher = Constraints(tokenizer or ByteLevelTokenizer()).matcher(SamplingParameters(**given))
    assert matcher is not None
    ids = list(text.encode()) if isinstance(text, str) else list(text)
    return matcher._matcher.try_consume_tokens(ids) == len(ids) and matcher._matcher.is_accepting()


@pytest.mark.parametrize(
    ("constraint", "answer"),
    [
        ({"json_schema": {"type": "object"}}, '{"a": 1}'),
        ({"regex": "a/[bc]+"}, "a/bc"),
        ({"choices": ("a b", 'c"')}, 'c"'),
        ({"grammar": 'start: "a" other | "start"\nother: start | "b"'}, "astart"),
    ],
)
def test_answers_are_constrained_behind_the_reasoning(constraint: dict[str, Any], answer: str) -> None:
    may_think, thinks = (AnswerBeginning(THINK, is_thinking) for is_thinking in (False, True))
    assert behind_reasoning(constraint, AnswerBeginning()) == constraint
    for beginning, text, fits in (
        (may_think, answer, True),
        (may_think, f"<think>{answer} is it</think>\n\n{answer}", True),
        (may_think, f"<think>{answer}", False),
        (thinks, f"Hm.</think>{answer}", True),
        (thinks, answer, False),
        (AnswerBeginning(form=HARMONY), f"<|channel|>final<|message|>{answer}", True),
        (AnswerBeginning(form=HARMONY), answer, False),
    ):
        assert accepted(behind_reasoning(constraint, beginning), text) is fits, text


class Marked(ByteLevelTokenizer):
    """Bytes, and marks that are special tokens, as those of gpt-oss and Kimi."""

    marks = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|constrain|>", "<|tool_call_start|>",
             "<|tool_call_end|>", "<think>", "</think>")  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self._vocab_size = 300 + len(self.marks)

    def encode(self, text: str) -> list[int]:
        pieces = re.split("(" + "|".join(map(re.escape, self.marks)) + ")", text)
        ids = [[300 + self.marks.index(piece)] if piece in self.marks else list(piece.encode()) for piece in pieces]
        return [token for piece in ids for token in piece]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.marks[token - 300] if token >= 300 else chr(token) for token in ids)

    def token_bytes(self) -> list[bytes | None]:
        return [bytes([token]) if token < 256 else None for token in range(self._vocab_size)]


def test_marks_that_are_special_tokens_are_named_by_their_ids() -> None:
    """A grammar's texts have no special tokens, so that a mark that is one cannot be spelled."""
    tokenizer = Marked()
    ids = {mark: number for number, mark in enumerate(Marked.marks, 300)}
    beginning = AnswerBeginning(THINK, False, ids.get)
    functions = [{"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}]
    harmony = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    harmony += '<|constrain|>json<|message|>{"x": 1}<|call|>'
    lfm2 = "<think>Hm.</think>\n<|tool_call_start|>[f(x=1)]<|tool_call_end|>"
    for form, text in ((HARMONY, harmony), (LFM2, lfm2)):
        constraint = required_call(form, functions, beginning)
        assert accepted(constraint, tokenizer.encode(text), tokenizer)
        assert not accepted(constraint, list(text.encode()), tokenizer)
    template = ChatTemplate("marked", "{{ messages[0].content }}<think></think><|tool_call_start|>", {}, False)
    chat = ChatFormat(template, tokenizer)
    assert chat.beginning(tokenizer.encode("Hi <think>\n")).is_thinking
    assert [chat.beginning([]).special_id(mark) for mark in ("<think>", "[", "</tool>")] == [308, None, None]
    chat.close()


# -- the server and `mt chat` ------------------------------------------------------------------------

TEMPLATE = """{%- for message in messages %}{{ '<|im_start|>' + message.role + '|' }}
{%- if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- message.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant|' }}{% if open %}{{ '<think>\n' }}{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def thinking() -> Iterator[ChatFormat]:
    chat = ChatFormat(ChatTemplate("thinking", TEMPLATE, {}, eod_after_answer=False), ByteLevelTokenizer())
    yield chat
    chat.close()


@pytest.mark.slow
def test_the_client_gets_reasoning_and_sends_it_back(thinking: ChatFormat) -> None:
    with live([scripted_model("Hm.\n</think>\n\nYes.", chat=thinking)]) as served:
        client = openai_client(served)
        question = {"role": "user", "content": "?"}
        asked: dict[str, Any] = {"model": "scripted", "extra_body": {"chat_template_kwargs": {"open": True}}}
        message = client.chat.completions.create(messages=[question], **asked).choices[0].message
        assert (message.content, message.reasoning_content) == ("Yes.", "Hm.")
        pieces = list(client.chat.completions.create(messages=[question], stream=True, **asked))
        deltas = [piece.choices[0].delta for piece in pieces]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
        assert "".join(delta.content or "" for delta in deltas) == "Yes."
        seen: list[str] = []
        encode = thinking.encode
        thinking.encode = lambda text: (seen.append(text), encode(text))[1]
        back = [question, message.model_dump(exclude_none=True), question]
        client.chat.completions.create(messages=back, **asked)
        assert "assistant|<think>\nHm.\n</think>\n\nYes.<|im_end|>" in seen[0]

        found = client.responses.create(input="?", **asked)
        thought, said = found.output
        assert (thought.type, thought.content[0].text, said.content[0].text) == ("reasoning", "Hm.", "Yes.")
        assert found.usage.output_tokens_details.reasoning_tokens > 3
        with client.responses.stream(input="?", **asked) as stream:
            kinds = [event.type for event in stream]
            assert stream.get_final_response().output_text == "Yes."
        assert kinds.index("response.reasoning_text.delta") < kinds.index("response.output_text.delta")
        assert kinds.count("response.output_item.done") == 2
        items = [question, *[item.model_dump(exclude_none=True) for item in found.output], question]
        client.responses.create(input=items, **asked)
        client.responses.create(input="?", previous_response_id=found.id, **asked)
        assert [text.count("<think>\nHm.\n</think>\n\nYes.") for text in seen[-2:]] == [1, 1]
        thinking.encode = encode


def test_the_terminal_shows_reasoning_and_keeps_it_beside_the_answer() -> None:
    asked: list[Any] = []

    def answer(messages: Sequence[Any], settings: Any) -> Iterator[str]:
        asked.append(messages)
        yield from (ReasoningText("Hm"), ReasoningText("."), "", "Yes", ".")

    shown, lines = io.StringIO(), iter(["?", "And?", "/quit"])
    partner: Any = SimpleNamespace(name="thinker", answer=answer)
    Conversation(partner, Console(file=shown, width=80)).run(lambda: next(lines))
    assert shown.getvalue().startswith("Hm.\n\nYes.\n")
    assert asked[1][1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


@pytest.mark.slow
def test_a_published_call_of_another_family_reaches_the_client() -> None:
    """A stream brings each call as it is complete; the arguments have the types of the schema."""
    import json

    published = FORMS["qwen3_coder"]
    template = ChatTemplate("qwen", "<tool_call><function={{ messages[0].content }}{# {{ tools }} #}", {}, False)
    chat = ChatFormat(template, ByteLevelTokenizer())
    with live([scripted_model(published.content + published.two, chat=chat)]) as served:
        client = openai_client(served)
        tools: Any = [{"type": "function", "function": function} for function in FUNCTIONS]
        asked: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "?"}], "tools": tools}
        with client.chat.completions.stream(**asked) as stream:
            events = [event.type for event in stream]
            message = stream.get_final_completion().choices[0].message
        whole = client.chat.completions.create(**asked).choices[0]
        for calls in (message.tool_calls, whole.message.tool_calls):
            found = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
            assert [name for name, _ in found] == ["get_weather", "now"]
            assert (found[0][1]["days"], found[0][1]["code"], found[0][1]["all"]) == (3, "007", False)
        assert (whole.message.content, whole.finish_reason) == (published.content, "tool_calls")
        assert events.count("tool_calls.function.arguments.done") == 2
    chat.close()
