"""Forms whose arguments are elements with a value each: texts as they are, all else in JSON, as the schema says."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from mt_infer.chat.tool_calls.form import CallForm, Function, Reading, Schemas, ToolCall, WriteCall
from mt_infer.chat.tool_calls.grammar import (
    NAME,
    GrammarWriter,
    declared,
    listed_values,
    literal,
    quoted,
    require_enforced,
)
from mt_infer.chat.tool_calls.reading import FUNCTION_NAME, between, element_call
from mt_infer.chat.tool_calls.values import (
    ANYTHING,
    Schema,
    as_json,
    resolved,
    schema_of,
    typed_value,
    types_of,
)

# -- <function=name><parameter=key>value</parameter></function> -------------------------------------

# The closing tag ends a value where another parameter or nothing follows: a value may have one too.
PARAMETER = re.compile(
    r"<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)


def _inside_function(text: str, schemas: Schemas) -> list[ToolCall] | None:
    name, mark, body = text.partition(">")
    return element_call(name, body, PARAMETER, schemas) if mark else None


def _function_form(section: tuple[str, str], line: str) -> CallForm:
    """line: what stands between a tag and the value."""

    def write(writer: GrammarWriter, function: Function) -> str:
        def parameter(name: str | None, schema: Schema, root: Schema) -> str:
            begin = (
                f'"<parameter=" {NAME} {quoted(">" + line)}' if name is None else quoted(f"<parameter={name}>{line}")
            )
            return f'{begin} {writer.value(schema, root, "</parameter>", before=line)} "\\n"'

        begin = quoted(function["name"] + ">\n")
        return f"{begin} {writer.parameters(function, parameter)} {writer.mark('</function>')}"

    read = between("<function=", "</function>", _inside_function)
    return CallForm(begin="<function=", read=read, grammar=write, section=section)


QWEN3_CODER = _function_form(("<tool_call>", "</tool_call>"), "\n")
SEED_OSS = _function_form(("<seed:tool_call>", "</seed:tool_call>"), "")


# -- name<arg_key>key</arg_key><arg_value>value</arg_value> -------------------------------------------


def _key_value_form(
    prefix: str = "", separator: str = "", section: tuple[str, str] | None = None, **others: Any
) -> CallForm:
    """prefix: of all tags. separator: the mark behind the name of the function."""
    key, key_end = f"<{prefix}arg_key>", f"</{prefix}arg_key>"
    value, value_end = f"<{prefix}arg_value>", f"</{prefix}arg_value>"
    call, call_end = f"<{prefix}tool_call>", f"</{prefix}tool_call>"
    pair = re.compile(rf"{key}(?P<name>.*?){key_end}\s*{value}(?P<value>.*?){value_end}(?=\s*(?:{key}|\Z))", re.DOTALL)

    def inside(text: str, schemas: Schemas) -> list[ToolCall] | None:
        name, mark, body = text.partition(separator or key)
        if separator and not mark:
            return None
        return element_call(name, body if separator else mark + body, pair, schemas)

    def write(writer: GrammarWriter, function: Function) -> str:
        def parameter(name: str | None, schema: Schema, root: Schema) -> str:
            named = f"{writer.mark(key)} {NAME if name is None else quoted(name)} {writer.mark(key_end)}"
            return f'{named} "\\n"? {writer.mark(value)} {writer.value(schema, root, value_end)} "\\n"?'

        begin = f"{quoted(function['name'])} {writer.mark(separator) if separator else ''}"
        return f'{begin} "\\n"? {writer.parameters(function, parameter)} {writer.mark(call_end)}'

    return CallForm(begin=call, read=between(call, call_end, inside), grammar=write, section=section, **others)


GLM = _key_value_form(stop=("<|user|>", "<|observation|>"))
HUNYUAN_V3 = _key_value_form(separator="<tool_sep>", section=("<tool_calls>", "</tool_calls>"))
LONGCAT = _key_value_form(prefix="longcat_")


# -- <invoke name="f"><parameter name="key">value</parameter></invoke> --------------------------------

IS_TEXT = {"true": True, "false": False}


def invoke_element(tag: str) -> re.Pattern[str]:
    return re.compile(
        rf'<{tag}parameter name="(?P<name>[^">]*)"(?: string="(?P<kind>true|false)")?>(?P<value>.*?)</{tag}parameter>'
        rf"(?=\s*(?:<{tag}parameter |\Z))",
        re.DOTALL,
    )


def read_invoke(tag: str, *, says_kind: bool = False) -> Callable[[str, Schemas, bool], Reading | None]:
    """tag: prefix of the tags' names. says_kind: parameters have an attribute that says whether they are texts."""
    element = invoke_element(tag)

    def inside(text: str, schemas: Schemas) -> list[ToolCall] | None:
        name, mark, body = text.partition('">')
        return element_call(name, body, element, schemas, IS_TEXT if says_kind else None) if mark else None

    return between(f'<{tag}invoke name="', f"</{tag}invoke>", inside)


def write_invoke(tag: str, *, says_kind: bool = False, line: str = "\n") -> WriteCall:
    close = f"</{tag}parameter>"

    def write(writer: GrammarWriter, function: Function) -> str:
        def parameter(name: str | None, schema: Schema, root: Schema) -> str:
            is_text = "false" if _is_json(schema, root) else "true"
            kind = f' string="{is_text}"' if says_kind else ""
            begin, end = f'<{tag}parameter name="', f'"{kind}>'
            head = f"{quoted(begin)} {NAME} {quoted(end)}" if name is None else quoted(begin + name + end)
            return f'{head} {writer.value(schema, root, close)} "\\n"'

        begin, end = quoted(function["name"] + '">' + line), quoted(f"</{tag}invoke>")
        return f"{begin} {writer.parameters(function, parameter)} {end}"

    return write


def _is_json(schema: Schema, root: Schema) -> bool:
    types = types_of(schema, root)
    return bool(types) and "string" not in types


def _invoke_form(tag: str, section: str, *, says_kind: bool = False) -> CallForm:
    return CallForm(
        begin=f'<{tag}invoke name="',
        read=read_invoke(tag, says_kind=says_kind),
        grammar=write_invoke(tag, says_kind=says_kind),
        section=(f"<{section}>", f"</{section}>"),
    )


MINIMAX_M2 = _invoke_form("", "minimax:tool_call")
DSML = "｜DSML｜"
DEEPSEEK_V32 = _invoke_form(DSML, f"{DSML}function_calls", says_kind=True)
DEEPSEEK_V4 = _invoke_form(DSML, f"{DSML}tool_calls", says_kind=True)


# -- MiniMax-M3: elements within elements, each tag behind a mark -------------------------------------

SPACE_MARK = "]<]minimax[>["
M3_TAG = re.compile(re.escape(SPACE_MARK) + r"<(/?)([^<>/\s]+)>")
M3_INVOKE, M3_INVOKE_END = f'{SPACE_MARK}<invoke name="', f"{SPACE_MARK}</invoke>"
DEEPEST = 20
Element = tuple[str, "str | list[Element]"]


def _inside_m3(text: str, schemas: Schemas) -> list[ToolCall] | None:
    name, mark, body = text.partition('">')
    if not mark or not FUNCTION_NAME.fullmatch(name):
        return None
    parsed = _elements(body, 0, "", 0)
    if parsed is None or isinstance(parsed[0], str):
        return [ToolCall(name, "{}")] if parsed is not None and not body.strip() else None
    schema = schemas.get(name, ANYTHING)
    return [ToolCall(name, as_json(_m3_object(parsed[0], schema, schema)))]


def _elements(text: str, place: int, parent: str, depth: int) -> tuple[str | list[Element], int] | None:
    """The content of an element from a place on: its elements, or its text; and where it ends, behind the closing tag.
    The content of no element goes to the end."""
    elements: list[Element] = []
    start = place
    while (tag := M3_TAG.search(text, place)) is not None and depth < DEEPEST:
        closes, name = tag[1], tag[2]
        if closes:
            if name != parent:
                return None
            return elements or text[start : tag.start()], tag.end()
        if text[place : tag.start()].strip():
            return None
        content = _elements(text, tag.end(), name, depth + 1)
        if content is None:
            return None
        elements.append((name, content[0]))
        place = content[1]
    if parent or text[place:].strip():
        return None
    return elements or text[start:], len(text)


def _m3_value(content: str | list[Element], schema: Schema, root: Schema) -> Any:
    schema = resolved(schema, root)
    types = types_of(schema, root)
    if isinstance(content, str):
        empty: Mapping[str, Any] = {"array": [], "object": {}}
        if not content.strip() and (kind := next((kind for kind in empty if kind in types), None)):
            return empty[kind]
        return typed_value(content, schema, root)
    if "array" in types or (not types and all(name == "item" for name, _ in content)):
        items = schema.get("items")
        return [_m3_value(inner, items if isinstance(items, Mapping) else ANYTHING, root) for _, inner in content]
    return _m3_object(content, schema, root)


def _m3_object(elements: list[Element], schema: Schema, root: Schema) -> dict[str, Any]:
    within = {**schema, **{key: root[key] for key in ("$defs", "definitions") if key in root}}
    return {name: _m3_value(content, schema_of(within, name), root) for name, content in elements}


def _write_m3(writer: GrammarWriter, function: Function) -> str:
    require_enforced(function)
    begin = quoted(function["name"] + '">')
    return f"{begin} {_m3_members(writer, function.get('parameters') or {}, 0)} {_m3_tag(writer, '/invoke')}"


def _m3_tag(writer: GrammarWriter, name: str) -> str:
    return f"{writer.mark(SPACE_MARK)} {quoted(f'<{name}>')}"


def _m3_members(writer: GrammarWriter, root: Schema, depth: int, schema: Schema | None = None) -> str:
    within = resolved(root if schema is None else schema, root)
    names, required = declared(within)
    if names is None:
        # A name that no schema declares is not constrained to close with the same one.
        return f"({_m3_tag(writer, 'value')} {_m3_text(writer, 'value')})*"
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    each = [(name, schema_of({**within, **definitions}, name)) for name in names]
    members = [
        (name, f"{_m3_tag(writer, name)} {_m3_written(writer, name, inner, root, depth)}") for name, inner in each
    ]
    return " ".join(member if name in required else f"({member})?" for name, member in members)


def _m3_text(writer: GrammarWriter, name: str) -> str:
    """A text and the closing tag."""
    if writer.is_special(SPACE_MARK):
        return f"{writer.until(SPACE_MARK)} {quoted(f'</{name}>')}"
    return writer.until(f"{SPACE_MARK}</{name}>")


def _m3_written(writer: GrammarWriter, name: str, schema: Schema, root: Schema, depth: int) -> str:
    """A value and the closing tag."""
    schema = resolved(schema, root)
    types, end = types_of(schema, root), _m3_tag(writer, f"/{name}")
    if depth < DEEPEST and types == {"object"}:
        return f"{_m3_members(writer, root, depth + 1, schema)} {end}"
    if depth < DEEPEST and types == {"array"}:
        items = schema.get("items")
        item = _m3_written(writer, "item", items if isinstance(items, Mapping) else ANYTHING, root, depth + 1)
        return f"({_m3_tag(writer, 'item')} {item})* {end}"
    if values := listed_values(schema):
        return f"({' | '.join(map(literal, values))}) {end}"
    return f"{writer.json(schema, root)} {end}" if types and "string" not in types else _m3_text(writer, name)


MINIMAX_M3 = CallForm(
    begin=M3_INVOKE,
    read=between(M3_INVOKE, M3_INVOKE_END, _inside_m3),
    grammar=_write_m3,
    section=(f"{SPACE_MARK}<tool_call>", f"{SPACE_MARK}</tool_call>"),
)
