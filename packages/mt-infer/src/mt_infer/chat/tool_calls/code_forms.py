"""Forms whose calls look like code: Python's (LFM2, Llama, Olmo 3), and Gemma's, whose keys have no quotes."""

from __future__ import annotations

import ast
import re
from typing import Any

from mt_infer.chat.tool_calls.form import CallForm, Function, Reading, Schemas, ToolCall, WriteCall
from mt_infer.chat.tool_calls.grammar import GrammarWriter, declared, either, quoted
from mt_infer.chat.tool_calls.reading import FUNCTION_NAME, between, json_calls, skip_space
from mt_infer.chat.tool_calls.unescaped_calls import UnescapedCalls
from mt_infer.chat.tool_calls.values import (
    ANYTHING,
    Schema,
    as_json,
    parse_json,
    resolved,
    schema_of,
    types_of,
)

# -- [name(key=value, ...), ...] -------------------------------------------------------------------

WORDS = {"true": True, "false": False, "null": None}
NO_CODE = (SyntaxError, ValueError, RecursionError, MemoryError, TypeError)


def python_calls(text: str, schemas: Schemas) -> list[ToolCall] | None:
    """Calls in a list, or each in a line; LFM2's models write JSON too where they are asked to, and LFM2.5's texts
    whose quotes are not escaped."""
    try:
        # Only parsed, nothing is evaluated.
        lines = ast.parse(text.strip()).body
        return [_python_call(node) for line in lines for node in _calls_of(line)] or None
    except NO_CODE:
        return json_calls(text, schemas) or _unescaped_calls(text.strip())


def _unescaped_calls(text: str) -> list[ToolCall] | None:
    inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        calls = UnescapedCalls(inside, _python_value).calls()
        return [ToolCall(name, as_json(arguments)) for name, arguments in calls]
    except (*NO_CODE, StopIteration):
        return None


def _calls_of(line: ast.stmt) -> list[ast.expr]:
    if not isinstance(line, ast.Expr):
        raise ValueError("no expression")
    return line.value.elts if isinstance(line.value, ast.List | ast.Tuple) else [line.value]


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    arguments = {keyword.arg: _python_value(keyword.value) for keyword in node.keywords}
    if None in arguments:
        raise ValueError("an argument without a name")
    return ToolCall(ast.unparse(node.func), as_json(arguments))


def _python_value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in WORDS:
        return WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _python_value(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key that is no text")
        return dict(zip(keys, map(_python_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("no value of JSON")
    return value


def _write_python(writer: GrammarWriter, function: Function) -> str:
    root = function.get("parameters") or {}
    names, required = declared(root)
    if names is None:
        key = f'/[a-zA-Z_][a-zA-Z0-9_]*/ "=" {writer.json({})}'
        return f'{quoted(function["name"] + "(")} ({key} (", " {key})*)? ")"'
    items = [(f'"{name}=" {_python_written(writer, schema_of(root, name), root)}', name in required) for name in names]
    return f'{quoted(function["name"] + "(")} {writer.separated(items, ", ")} ")"'


def _python_written(writer: GrammarWriter, schema: Schema, root: Schema) -> str:
    types = types_of(schema, root)
    words = {"boolean": '"True" | "False"', "null": '"None"'}
    named = [words[kind] for kind in sorted(types) if kind in words]
    if not named:
        return writer.json(resolved(schema, root), root)
    others = [kind for kind in sorted(types) if kind not in words]
    return either([*named, *(writer.json({**resolved(schema, root), "type": kind}, root) for kind in others)])


def _python_list(close: str) -> WriteCall:
    def write(writer: GrammarWriter, function: Function) -> str:
        return f'"[" {_write_python(writer, function)} "]" {writer.mark(close)}'

    return write


LFM2 = CallForm(
    begin="<|tool_call_start|>",
    read=between("<|tool_call_start|>", "<|tool_call_end|>", python_calls, closes_itself=True),
    grammar=_python_list("<|tool_call_end|>"),
    then=("[",),
)


def _write_olmo3(writer: GrammarWriter, function: Function) -> str:
    return f'"\\n" {_write_python(writer, function)} "\\n" {writer.mark("</function_calls>")}'


OLMO3 = CallForm(
    begin="<function_calls>",
    read=between("<function_calls>", "</function_calls>", python_calls, closes_itself=True),
    grammar=_write_olmo3,
)

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"


def _read_pythonic(text: str, schemas: Schemas, is_end: bool) -> Reading | None:
    """All of an answer."""
    inside = text.strip().removeprefix(PYTHON_START).removesuffix(PYTHON_END).strip()
    calls = python_calls(inside, schemas) if is_end and inside.startswith("[") else None
    return None if calls is None else (calls, len(text))


def _write_pythonic(writer: GrammarWriter, function: Function) -> str:
    return f'"[" {_write_python(writer, function)} "]"'


PYTHONIC = CallForm(begin="[", also=(PYTHON_START,), read=_read_pythonic, grammar=_write_pythonic, at_start=True)


# -- call:name{key:value} --------------------------------------------------------------------------


class GemmaReader:
    """An object of Gemma's. quote: the mark around texts."""

    def __init__(self, text: str, quote: str) -> None:
        self.text, self.quote, self.place = text, quote, 0

    def object(self, depth: int = 0) -> dict[str, Any]:
        """Raises ValueError, as all others do."""
        members: dict[str, Any] = {}
        self._take("{")
        while not self._ends("}", members):
            key = self._string() if self.text.startswith(self.quote, self.place) else self._plain(":").strip()
            self._take(":")
            members[key] = self._value(depth + 1)
        return members

    def _value(self, depth: int) -> Any:
        self._skip()
        if depth > 50:
            raise ValueError("nested too deeply")
        if self.text.startswith(self.quote, self.place):
            return self._string()
        if self.text.startswith("{", self.place):
            return self.object(depth)
        if self.text.startswith("[", self.place):
            return self._list(depth)
        plain = self._plain(",}]").strip()
        try:
            return parse_json(plain)
        except ValueError:
            return plain

    def _list(self, depth: int) -> list[Any]:
        elements: list[Any] = []
        self._take("[")
        while not self._ends("]", elements):
            elements.append(self._value(depth + 1))
        return elements

    def _string(self) -> str:
        start = self.place + len(self.quote)
        end = self.text.index(self.quote, start)
        self.place = end + len(self.quote)
        return self.text[start:end]

    def _plain(self, ends: str) -> str:
        start = self.place
        while self.place < len(self.text) and self.text[self.place] not in ends:
            self.place += 1
        return self.text[start : self.place]

    def _ends(self, bracket: str, members: Any) -> bool:
        """Whether the bracket closes here; else the comma between two members is taken."""
        self._skip()
        if self.text.startswith(bracket, self.place):
            self.place += 1
            return True
        if members:
            self._take(",")
            self._skip()
        return False

    def _skip(self) -> None:
        self.place = skip_space(self.text, self.place)

    def _take(self, letter: str) -> None:
        self._skip()
        if not self.text.startswith(letter, self.place):
            raise ValueError(f"{letter} expected")
        self.place += len(letter)


GEMMA_CALL = re.compile(r"\s*call:\s*([^\s{]+)\s*(?=\{)")


def _gemma_form(begin: str, close: str, quote: str, stop: tuple[str, ...]) -> CallForm:
    def inside(text: str, schemas: Schemas) -> list[ToolCall] | None:
        head = GEMMA_CALL.match(text)
        if head is None or not FUNCTION_NAME.fullmatch(head[1]):
            return None
        reader = GemmaReader(text[head.end() :], quote)
        try:
            arguments = reader.object()
        except ValueError:
            return None
        return [ToolCall(head[1], as_json(arguments))] if not reader.text[reader.place :].strip() else None

    def write(writer: GrammarWriter, function: Function) -> str:
        root = function.get("parameters") or {}
        body = GemmaWriter(writer, quote, root).object(root, 0)
        return f"{quoted('call:' + function['name'])} {body} {writer.mark(close)}"

    read = between(begin, close, inside, closes_itself=True)
    return CallForm(begin=begin, read=read, grammar=write, then=("call:",), stop=stop)


class GemmaWriter:
    """Grammars of Gemma's objects. root: the schema whose definitions others refer to."""

    def __init__(self, writer: GrammarWriter, quote: str, root: Schema) -> None:
        self._writer, self._quote, self._root = writer, quote, root

    def object(self, schema: Schema, depth: int) -> str:
        schema = resolved(schema, self._root)
        names, required = declared(schema)
        if names is None:
            return self._any_object()
        definitions = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        within = {**schema, **definitions}
        items = [
            (f"{quoted(name + ':')} {self.value(schema_of(within, name), depth + 1)}", name in required)
            for name in names
        ]
        return f'"{{" {self._writer.separated(items)} "}}"'

    def value(self, schema: Schema, depth: int) -> str:
        schema = resolved(schema, self._root)
        types, strings = types_of(schema, self._root), schema.get("enum")
        if types == {"string"} and strings:
            return either(
                f"{self._writer.mark(self._quote)} {quoted(text)} {self._writer.mark(self._quote)}" for text in strings
            )
        if not types or depth > DEEPEST or (types & {"array", "object"} and len(types) > 1):
            return self._any()
        return either(self._of_type(kind, schema, depth) for kind in sorted(types))

    def _of_type(self, kind: str, schema: Schema, depth: int) -> str:
        if kind == "string":
            return self._string()
        if kind == "object":
            return self.object(schema, depth)
        if kind == "array":
            items = schema.get("items")
            item = self.value(items if isinstance(items, dict) else ANYTHING, depth + 1)
            return self._writer.rule(f'"[" ({item} ("," {item})*)? "]"')
        return self._writer.json({**schema, "type": kind}, self._root)

    def _string(self) -> str:
        return f"{self._writer.mark(self._quote)} {self._writer.until(self._quote)}"

    def _any(self) -> str:
        """A value of any type, without objects and lists within others."""
        plain = self._writer.json({"type": ["number", "boolean", "null"]})
        return either([self._string(), plain, f'"[" ({self._string()} ("," {self._string()})*)? "]"'])

    def _any_object(self) -> str:
        pair = self._writer.rule(f'/[a-zA-Z_][a-zA-Z0-9_]*/ ":" {self._any()}')
        return f'"{{" ({pair} ("," {pair})*)? "}}"'


DEEPEST = 8
GEMMA4 = _gemma_form("<|tool_call>", "<tool_call|>", '<|"|>', stop=("<|tool_response>", "<turn|>"))
FUNCTION_GEMMA = _gemma_form(
    "<start_function_call>", "<end_function_call>", "<escape>", stop=("<start_function_response>", "<end_of_turn>")
)
