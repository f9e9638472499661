"""Values of arguments that a model has written as plain text, by the JSON schema of the function's parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]
ANYTHING: Schema = {}
PYTHON_WORDS = {"True": True, "False": False, "None": None}
"""What templates write for booleans and None with Jinja's `string` filter."""


def schema_of(parameters: Schema, name: str) -> Schema:
    """The schema of one parameter; {} for one that is not declared."""
    declared = resolved(parameters, parameters)
    schema = _entry(declared, "properties").get(name)
    if schema is None:
        # A schema may be put together from others, which then hold the properties.
        branches = [resolved(branch, parameters) for branch in alternatives(declared)]
        schema = next((entry for branch in branches if (entry := _entry(branch, "properties").get(name))), ANYTHING)
    return schema if isinstance(schema, Mapping) else ANYTHING


def _entry(schema: Schema, key: str) -> Mapping[str, Any]:
    entry = schema.get(key)
    return entry if isinstance(entry, Mapping) else ANYTHING


def alternatives(schema: Schema) -> list[Schema]:
    listed = [branch for key in ("anyOf", "oneOf", "allOf") for branch in schema.get(key) or ()]
    return [branch for branch in listed if isinstance(branch, Mapping)]


def resolved(schema: Schema, root: Schema) -> Schema:
    """The schema that a local $ref names; the schema itself without one."""
    for _ in range(MOST_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            return ANYTHING
        schema = target
    return ANYTHING


MOST_REFERENCES = 20
"""References may form a circle."""


def types_of(schema: Schema, root: Schema, depth: int = 0) -> frozenset[str]:
    """JSON's types of the values that the schema may have; empty: any."""
    schema = resolved(schema, root)
    if "type" in schema:
        kinds = schema["type"]
        return frozenset([kinds] if isinstance(kinds, str) else kinds)
    if "const" in schema:
        return frozenset([type_of(schema["const"])])
    if isinstance(schema.get("enum"), list):
        return frozenset(map(type_of, schema["enum"]))
    if depth > MOST_REFERENCES:
        return frozenset()
    branches = [types_of(branch, root, depth + 1) for branch in alternatives(schema)]
    # A branch of any type makes the whole one of any type.
    if branches and all(branches):
        return frozenset[str]().union(*branches)
    return frozenset(["object"]) if "properties" in schema else frozenset()


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    kinds: dict[type, str] = {float: "number", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]


def typed_value(text: str, schema: Schema, root: Schema) -> Any:
    """The value that a text stands for: JSON where the schema asks for another type than a string, or for none; else,
    and where it is no JSON of these types, the text."""
    types = types_of(schema, root)
    if types == {"string"} or text in _strings(resolved(schema, root)):
        return text
    try:
        value = parse_json(text.strip())
    except ValueError:
        return text
    kind = type_of(value)
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return value if fits or "string" not in types else text


def _strings(schema: Schema) -> list[str]:
    values = schema.get("enum")
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def parse_json(text: str) -> Any:
    """JSON, or a word of Python. Raises ValueError."""
    if text in PYTHON_WORDS:
        return PYTHON_WORDS[text]
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def decode_json(text: str, start: int) -> tuple[Any, int] | None:
    """The JSON value at a place of a text, and its end; None without a complete one."""
    try:
        return DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


DECODER = json.JSONDecoder(parse_constant=_no_number)


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
