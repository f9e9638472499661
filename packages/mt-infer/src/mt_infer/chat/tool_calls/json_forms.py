"""Forms whose calls are in JSON: the whole call, or its arguments behind the name of the function."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mt_infer.chat.tool_calls.form import (
    CallForm,
    Function,
    Reading,
    Schemas,
    ToolCall,
    WriteCall,
    nine_letters,
    numbered_id,
)
from mt_infer.chat.tool_calls.grammar import SPACE, GrammarWriter, quoted
from mt_infer.chat.tool_calls.reading import between, json_call, json_calls, json_list, named_json, skip_space
from mt_infer.chat.tool_calls.values import as_json, decode_json

OBJECT = {"type": "object"}


def call_schema(function: Function, key: str = "arguments") -> dict[str, object]:
    properties = {"name": {"const": function["name"]}, key: arguments_schema(function)}
    return {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}


def arguments_schema(function: Function) -> dict[str, object]:
    return dict(function.get("parameters") or OBJECT)


def whole_call(close: str, key: str = "arguments") -> WriteCall:
    def write(writer: GrammarWriter, function: Function) -> str:
        return f"{SPACE} {writer.json(_with_definitions(function, key))} {SPACE} {writer.mark(close)}"

    return write


def _with_definitions(function: Function, key: str) -> dict[str, object]:
    """References of a schema are from its root, which is now the call's."""
    schema, parameters = call_schema(function, key), arguments_schema(function)
    return {**{name: parameters[name] for name in ("$defs", "definitions") if name in parameters}, **schema}


def _list_of_one(close: str = "") -> WriteCall:
    def write(writer: GrammarWriter, function: Function) -> str:
        end = f" {writer.mark(close)}" if close else ""
        return f'{SPACE} "[" {writer.json(_with_definitions(function, "arguments"))} "]"{end}'

    return write


def _object_form(begin: str, close: str) -> CallForm:
    """{"name": ..., "arguments": {...}} between two marks."""
    return CallForm(
        begin=begin,
        read=between(begin, close, json_calls, closes_itself=True),
        grammar=whole_call(close),
        then=("{", "["),
    )


HERMES = _object_form("<tool_call>", "</tool_call>")
LONGCAT_JSON = _object_form("<longcat_tool_call>", "</longcat_tool_call>")


def _list_form(begin: str, close: str) -> CallForm:
    """[{"name": ..., "arguments": {...}}, ...] between two marks."""
    read = between(begin, close, json_calls, closes_itself=True)
    return CallForm(begin=begin, read=read, grammar=_list_of_one(close), then=("[", "{"))


TOOL_CALLS_LIST = _list_form("<tool_calls>", "</tool_calls>")
NEMOTRON = _list_form("<TOOLCALL>", "</TOOLCALL>")
GRANITE = CallForm(
    begin="<|tool_call|>",
    read=json_list("<|tool_call|>"),
    grammar=_list_of_one(),
    then=("[",),
    after=("<|/tool_call|>",),
)


# -- Phi-4-mini: a list behind a word ---------------------------------------------------------------


def _as_functools(calls: Sequence[tuple[str, Any]]) -> str:
    written = (f'{{"name": {as_json(name)}, "arguments": {as_json(arguments)}}}' for name, arguments in calls)
    return f"functools[{', '.join(written)}]"


PHI4_MINI = CallForm(
    begin="functools", read=json_list("functools"), grammar=_list_of_one(), then=("[",), as_text=_as_functools
)


# -- the whole answer is calls ---------------------------------------------------------------------

PYTHON_TAGS = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")
"""Marks that Llama 3 and Llama 4 may write before a call, Llama 4 behind it too."""


def _read_llama3(text: str, schemas: Schemas, is_end: bool) -> Reading | None:
    start = skip_space(text, 0)
    while (tag := next((tag for tag in PYTHON_TAGS if text.startswith(tag, start)), None)) is not None:
        start = skip_space(text, start + len(tag))
    decoded = decode_json(text, start)
    # "parameters" first: a function may have an argument of the other name.
    call = None if decoded is None else json_call(decoded[0], {}, ("parameters", "arguments"))
    return None if call is None or decoded is None else ([call], decoded[1])


def _write_llama3(writer: GrammarWriter, function: Function) -> str:
    return writer.json(_with_definitions(function, "parameters"))


LLAMA3_JSON = CallForm(
    begin="{", also=PYTHON_TAGS, read=_read_llama3, grammar=_write_llama3, after=(";", PYTHON_TAGS[2]), at_start=True
)


# -- Mistral ---------------------------------------------------------------------------------------

MISTRAL_MARK = "[TOOL_CALLS]"
MISTRAL_HEAD = re.compile(
    r"\[TOOL_CALLS\]\s*([^\s\[\]{}]+?)\s*(?:\[CALL_ID\]\s*([a-zA-Z0-9]+)\s*)?(?:\[ARGS\]\s*)?(?=\{)"
)


MISTRAL_ALONE = re.compile(
    r"\[TOOL_CALLS\]\s*([^\s\[\]{}]+?)\s*(?:\[CALL_ID\]\s*([a-zA-Z0-9]+)\s*)?(?:\[ARGS\]\s*)?"
    r"(?=\[TOOL_CALLS\]|</s>|\Z)"
)


def _mistral_alone(text: str, schemas: Schemas, is_end: bool) -> Reading | None:
    """A name without arguments, of a function that needs none: of others it is a call that is cut off."""
    match = MISTRAL_ALONE.match(text)
    if match is None or (match.end() == len(text) and not is_end):
        return None
    name = match[1]
    if name not in schemas or schemas[name].get("required"):
        return None
    return [ToolCall(name, "{}", match[2])], match.end()


def _read_mistral(text: str, schemas: Schemas, is_end: bool) -> Reading | None:
    """A list, or the name and the arguments, with a mark between them or not; or the name alone."""
    alone = _mistral_alone(text, schemas, is_end)
    if alone is not None:
        return alone
    head = MISTRAL_HEAD.match(text)
    if head is None:
        return json_list(MISTRAL_MARK)(text, schemas, is_end)
    decoded = decode_json(text, head.end())
    if decoded is None:
        return None
    calls = named_json(head[1], text[head.end() : decoded[1]], schemas, head[2])
    return None if calls is None else (calls, decoded[1])


def _write_mistral(writer: GrammarWriter, function: Function) -> str:
    return f"{quoted(function['name'])} {writer.mark('[ARGS]')} {writer.json(arguments_schema(function))}"


MISTRAL_LIST = CallForm(begin=MISTRAL_MARK, read=_read_mistral, grammar=_list_of_one(), call_id=nine_letters)
MISTRAL = CallForm(begin=MISTRAL_MARK, read=_read_mistral, grammar=_write_mistral, call_id=nine_letters)


# -- DeepSeek and Kimi: the name, a mark, the arguments ---------------------------------------------

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCED = re.compile(r"\s*([^\n]+?)\s*```json\s*(.*?)\s*```\s*", re.DOTALL)


def _inside_deepseek(text: str, schemas: Schemas) -> list[ToolCall] | None:
    """name, mark, arguments (V3.1); the kind, mark, name, arguments as a block of code (V3, R1)."""
    first, mark, rest = text.partition(SEPARATOR)
    fenced = FENCED.fullmatch(rest)
    if fenced is not None:
        return named_json(fenced[1], fenced[2], schemas)
    return named_json(first, rest, schemas) if mark else None


def _write_deepseek(writer: GrammarWriter, function: Function) -> str:
    name, separator, close = quoted(function["name"]), writer.mark(SEPARATOR), writer.mark(CALL_END)
    return f"{name} {separator} {writer.json(arguments_schema(function))} {close}"


def _write_deepseek_v3(writer: GrammarWriter, function: Function) -> str:
    head = f'"function" {writer.mark(SEPARATOR)} {quoted(function["name"] + chr(10) + "```json" + chr(10))}'
    return f'{head} {writer.json(arguments_schema(function))} "\\n```" {writer.mark(CALL_END)}'


def _deepseek(write: WriteCall) -> CallForm:
    return CallForm(
        begin=CALL_BEGIN,
        read=between(CALL_BEGIN, CALL_END, _inside_deepseek, closes_itself=True),
        grammar=write,
        section=(CALLS_BEGIN, CALLS_END),
    )


DEEPSEEK_V31, DEEPSEEK_V3 = _deepseek(_write_deepseek), _deepseek(_write_deepseek_v3)

KIMI_CALL, KIMI_ARGUMENTS, KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
KIMI_ID = re.compile(r"\s*((?:functions\.)?([^\s:]+):\d+)\s*")


def _inside_kimi(text: str, schemas: Schemas) -> list[ToolCall] | None:
    identity, mark, arguments = text.partition(KIMI_ARGUMENTS)
    match = KIMI_ID.fullmatch(identity)
    return None if match is None or not mark else named_json(match[2], arguments, schemas, match[1])


def _write_kimi(writer: GrammarWriter, function: Function) -> str:
    name = f"{quoted('functions.' + function['name'] + ':')} /[0-9]{{1,4}}/"
    return f"{name} {writer.mark(KIMI_ARGUMENTS)} {writer.json(arguments_schema(function))} {writer.mark(KIMI_END)}"


KIMI_K2 = CallForm(
    begin=KIMI_CALL,
    read=between(KIMI_CALL, KIMI_END, _inside_kimi, closes_itself=True),
    grammar=_write_kimi,
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    call_id=numbered_id,
)
