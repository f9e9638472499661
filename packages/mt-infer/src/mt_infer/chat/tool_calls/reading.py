"""Reading calls from a text: what most forms are put together from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mt_infer.chat.tool_calls.form import ReadCalls, Reading, Schemas, ToolCall
from mt_infer.chat.tool_calls.values import as_json, decode_json, parse_json, schema_of, typed_value

Inside = Callable[[str, Schemas], list[ToolCall] | None]
"""The calls that a text between two marks is; None if it is none."""
MOST_ENDS = 4
"""Closing marks that are tried: a text among the arguments may have the mark too."""
FUNCTION_NAME = re.compile(r"[^\s<>{}\[\]\"'`|]{1,200}")


def between(begin: str, close: str, inside: Inside, *, closes_itself: bool = False) -> ReadCalls:
    """Calls between two marks. closes_itself: a call is complete without the closing mark where the answer ends, which
    a stop text may have taken away."""

    def read(text: str, schemas: Schemas, is_end: bool) -> Reading | None:
        start = len(begin)
        for end in _places(text, close, start):
            if (calls := inside(text[start:end], schemas)) is not None:
                return calls, end + len(close)
        calls = inside(text[start:], schemas) if is_end and closes_itself else None
        return None if calls is None else (calls, len(text))

    return read


def _places(text: str, mark: str, start: int) -> Iterator[int]:
    place = text.find(mark, start)
    for _ in range(MOST_ENDS):
        if place < 0:
            return
        yield place
        place = text.find(mark, place + 1)


# -- in JSON ---------------------------------------------------------------------------------------


def json_call(value: Any, schemas: Schemas, keys: tuple[str, ...] = ("arguments", "parameters")) -> ToolCall | None:
    """The call that an object of JSON stands for. keys: where its arguments may be."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    name = value["name"]
    arguments = next((value[key] for key in keys if key in value), None)
    # A function without parameters may be called without arguments.
    arguments = {} if arguments is None and name in schemas else json_object(arguments)
    identity = value.get("id")
    if arguments is None:
        return None
    return ToolCall(name, as_json(arguments), identity if isinstance(identity, str) else None)


def json_object(value: Any) -> dict[str, Any] | None:
    """An object, or the one that a text in JSON is; None for all else."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError:
            return None
    return value if isinstance(value, dict) else None


def json_calls(text: str, schemas: Schemas) -> list[ToolCall] | None:
    """One object or a list of them."""
    try:
        value = parse_json(text.strip())
    except ValueError:
        return None
    calls = [json_call(entry, schemas) for entry in (value if isinstance(value, list) else [value])]
    return None if not calls or None in calls else [call for call in calls if call is not None]


def json_list(begin: str) -> ReadCalls:
    """A list of calls behind a mark, which nothing closes."""

    def read(text: str, schemas: Schemas, is_end: bool) -> Reading | None:
        start = skip_space(text, len(begin))
        decoded = decode_json(text, start)
        calls = None if decoded is None else json_calls(text[start : decoded[1]], schemas)
        return None if calls is None or decoded is None else (calls, decoded[1])

    return read


def named_json(name: str, text: str, schemas: Schemas, identity: str | None = None) -> list[ToolCall] | None:
    """A call whose arguments are an object in JSON; no text stands for no arguments."""
    name = name.strip()
    arguments = json_object(text.strip() or "{}")
    if arguments is None or not FUNCTION_NAME.fullmatch(name):
        return None
    return [ToolCall(name, as_json(arguments), identity)]


def skip_space(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start


# -- as elements with plain text -------------------------------------------------------------------


def element_call(
    name: str, body: str, element: re.Pattern[str], schemas: Schemas, texts: Mapping[str, bool] | None = None
) -> list[ToolCall] | None:
    """A call whose arguments are elements one after another, and nothing else. element: with the groups `name` and
    `value`, and `kind` where the model says itself what is a text (a key of `texts`)."""
    name = name.strip()
    schema = schemas.get(name, {})
    arguments: dict[str, Any] = {}
    place = skip_space(body, 0)
    while place < len(body):
        match = element.match(body, place)
        if match is None:
            return None
        key, value = match["name"].strip(), match["value"]
        kind = None if texts is None else texts.get(match["kind"] or "")
        of_key = schema_of(schema, key) if kind is None else ({"type": "string"} if kind else {})
        arguments[key] = typed_value(value, of_key, schema)
        place = skip_space(body, match.end())
    return [ToolCall(name, as_json(arguments))] if FUNCTION_NAME.fullmatch(name) else None
