"""Forms whose answers are messages with headers: harmony (gpt-oss) and Muse Glimmer's, in which a header says to whom
its body is addressed. What is thought and what is said are such messages too."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mt_infer.chat.tool_calls.element_forms import read_invoke, write_invoke
from mt_infer.chat.tool_calls.form import BodyKind, CallForm, Function, MessageFrame, Schemas, ToolCall
from mt_infer.chat.tool_calls.grammar import TEXT, GrammarWriter, either, quoted
from mt_infer.chat.tool_calls.json_forms import arguments_schema
from mt_infer.chat.tool_calls.reading import named_json

START, CHANNEL, MESSAGE, CALL, END = "<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|end|>"
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


# -- harmony ---------------------------------------------------------------------------------------


def _harmony_kind(header: str) -> tuple[BodyKind, str]:
    recipient = RECIPIENT.search(header)
    if recipient is not None:
        return "call", recipient[1]
    return ("reasoning" if f"{CHANNEL}analysis" in header else "content"), ""


def _read_harmony(name: str, body: str, schemas: Schemas) -> list[ToolCall] | None:
    return named_json(name, body, schemas)


def _harmony_message(writer: GrammarWriter, channel: str) -> str:
    """A message before the last one."""
    head = f"{writer.mark(CHANNEL)} {quoted(channel)} {writer.mark(MESSAGE)}"
    return f'{head} {writer.until(END)} {writer.mark(START)} "assistant"'


def _harmony_call(writer: GrammarWriter, function: Function) -> str:
    """The recipient stands behind the channel or before it."""
    recipient, channel = f"to=functions.{function['name']}", writer.mark(CHANNEL)
    behind = f'{channel} {quoted(f"commentary {recipient} ")} {writer.mark("<|constrain|>")} "json"'
    before = f'{quoted(f" {recipient}")} {channel} "commentary json"'
    body = f"{writer.mark(MESSAGE)} {writer.json(arguments_schema(function))} {writer.mark(CALL)}"
    return f"({behind} | {before}) {body}"


def _harmony_required(writer: GrammarWriter, functions: Sequence[Function]) -> str:
    calls = either(_harmony_call(writer, function) for function in functions)
    return f"({_harmony_message(writer, 'analysis')})* {calls}"


def _harmony_offered(writer: GrammarWriter, functions: Sequence[Function]) -> str:
    before = either(_harmony_message(writer, channel) for channel in ("analysis", "commentary"))
    final = _harmony_final(writer, TEXT)
    return f"({before})* {either([final, *(_harmony_call(writer, function) for function in functions)])}"


def _harmony_answer(writer: GrammarWriter, expression: str) -> str:
    return f"({_harmony_message(writer, 'analysis')})* {_harmony_final(writer, expression)}"


def _harmony_final(writer: GrammarWriter, expression: str) -> str:
    return f'{writer.mark(CHANNEL)} "final" {writer.mark(MESSAGE)} {expression}'


HARMONY_FRAME = MessageFrame(
    headers=(START, CHANNEL, "to=", MESSAGE),
    ends=(END, CALL, "<|return|>"),
    kind_of=_harmony_kind,
    read=_read_harmony,
    required=_harmony_required,
    offered=_harmony_offered,
    answer=_harmony_answer,
)


# -- Muse Glimmer ----------------------------------------------------------------------------------

TAG = "atem:"
MUSE_ENDS = ("<|eom|>", "<|eot|>")
READ_INVOKE = read_invoke(TAG)
SECTION, SECTION_END = f"<{TAG}function_calls>", f"</{TAG}function_calls>"


def _muse_kind(header: str) -> tuple[BodyKind, str]:
    recipient = RECIPIENT.search(header)
    if recipient is None or recipient[1] == "user":
        return "content", ""
    return ("reasoning", "") if recipient[1] == "self" else ("call", recipient[1])


def _read_muse(name: str, body: str, schemas: Schemas) -> list[ToolCall] | None:
    """All calls of a message."""
    rest, calls = body.replace(SECTION, "", 1).strip(), list[ToolCall]()
    while rest and rest != SECTION_END:
        reading = READ_INVOKE(rest, {**schemas, **_with_spaces_of_names(schemas)}, True)
        if reading is None or not rest.startswith(f"<{TAG}invoke"):
            return None
        calls += [ToolCall(_known(call.name, schemas), call.arguments) for call in reading[0]]
        rest = rest[reading[1] :].strip()
    return calls or None


def _with_spaces_of_names(schemas: Schemas) -> Schemas:
    """The template shows a function without a namespace as one of its own, `f.f`."""
    return {written: schema for name, schema in schemas.items() for written in (f"{name}.{name}", f"functions.{name}")}


def _known(written: str, schemas: Schemas) -> str:
    space, _, name = written.partition(".")
    return name if written not in schemas and name in schemas and space in (name, "functions") else written


def _muse_thought(writer: GrammarWriter) -> str:
    return f'" to=self" {writer.mark(MESSAGE)} {writer.until("<|eom|>")} {writer.mark(START)} "assistant"'


def _muse_call(writer: GrammarWriter, function: Function) -> str:
    begin = quoted(f'{SECTION}\n<{TAG}invoke name="')
    call = write_invoke(TAG)(writer, function)
    head = f"{quoted(' to=' + function['name'])} {writer.mark(MESSAGE)}"
    end = either(writer.mark(mark) for mark in MUSE_ENDS)
    return f"{head} {begin} {call} {quoted(chr(10) + SECTION_END)} {end}"


def _muse_required(writer: GrammarWriter, functions: Sequence[Function]) -> str:
    return f"({_muse_thought(writer)})* {either(_muse_call(writer, function) for function in functions)}"


def _muse_offered(writer: GrammarWriter, functions: Sequence[Function]) -> str:
    said = _muse_said(writer, TEXT)
    return f"({_muse_thought(writer)})* {either([said, *(_muse_call(writer, function) for function in functions)])}"


def _muse_answer(writer: GrammarWriter, expression: str) -> str:
    return f"({_muse_thought(writer)})* {_muse_said(writer, expression)}"


def _muse_said(writer: GrammarWriter, expression: str) -> str:
    return f'" to=user" {writer.mark(MESSAGE)} {expression}'


MUSE_FRAME = MessageFrame(
    headers=(START, "to=", MESSAGE),
    ends=MUSE_ENDS,
    kind_of=_muse_kind,
    read=_read_muse,
    required=_muse_required,
    offered=_muse_offered,
    answer=_muse_answer,
)


def _framed(frame: MessageFrame, *, stop: tuple[str, ...], one_call_a_message: bool = False) -> CallForm:
    """Messages are read by the frame; nothing else is a call."""
    return CallForm(
        begin=frame.start,
        read=lambda text, schemas, is_end: None,
        grammar=lambda writer, function: frame.required(writer, [function]),
        frame=frame,
        stop=stop,
        one_call_a_message=one_call_a_message,
    )


HARMONY = _framed(HARMONY_FRAME, stop=(CALL, "<|return|>"), one_call_a_message=True)
MUSE = _framed(MUSE_FRAME, stop=("<|eot|>",))
