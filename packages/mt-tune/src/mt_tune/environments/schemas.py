"""JSON schemas of Python functions, as chat templates describe tools: from type hints and Google docstrings."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mt_core.errors import ConfigError

TYPES: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    list: {"type": "array"},
    dict: {"type": "object"},
    type(None): {"type": "null"},
    Any: {},
}
SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Return|Yields|Raises|Examples?|Notes?)\s*:\s*$")
ARGUMENT = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The object that OpenAI's interface and chat templates take: {"type": "function", "function": {name, description,
    parameters}}. Raises ConfigError for a function without a docstring, and for an argument without a type hint or a
    line in the docstring's Args."""
    name = function.__name__
    text, lines = _docstring(function)
    hints = get_type_hints(function)
    signature = inspect.signature(function)
    properties, required = {}, []
    for parameter in signature.parameters.values():
        if parameter.name not in hints or parameter.name not in lines:
            missing = "type hint" if parameter.name not in hints else "line under Args: in its docstring"
            raise ConfigError(f"the tool {name} needs a {missing} for its argument {parameter.name}")
        properties[parameter.name] = {**type_schema(hints[parameter.name], name), "description": lines[parameter.name]}
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


def type_schema(hint: Any, name: str) -> dict[str, Any]:
    """The schema of a type hint. Raises ConfigError for a type that JSON does not have."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in TYPES:
        return dict(TYPES[hint])
    if origin is Literal:
        return {**type_schema(type(arguments[0]), name), "enum": list(arguments)}
    if origin in (list, set, tuple) and arguments:
        return {"type": "array", "items": type_schema(arguments[0], name)}
    if origin is dict:
        return {"type": "object", "additionalProperties": type_schema(arguments[1], name)}
    if origin in (Union, types.UnionType):
        return _union([type_schema(argument, name) for argument in arguments if argument is not type(None)], arguments)
    raise ConfigError(f"the tool {name} has an argument of type {hint}, which JSON does not have")


def _union(schemas: list[dict[str, Any]], arguments: tuple[Any, ...]) -> dict[str, Any]:
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(list(each) == ["type"] for each in schemas):
        schema = {"type": sorted(each["type"] for each in schemas)}
    else:
        schema = {"anyOf": schemas}
    return {**schema, "nullable": True} if type(None) in arguments else schema


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The description, and the lines of the arguments by name."""
    text = inspect.getdoc(function)
    if not text:
        raise ConfigError(f"the tool {function.__name__} needs a docstring, which tells the model what it does")
    sections: dict[str, list[str]] = {"": []}
    current = ""
    for line in text.splitlines():
        if match := SECTION.match(line):
            current = match[1]
        sections.setdefault(current, []).append("" if match else line)
    arguments = next((sections[key] for key in ("Args", "Arguments", "Parameters") if key in sections), [])
    return "\n".join(sections[""]).strip(), _arguments(arguments)


def _arguments(lines: list[str]) -> dict[str, str]:
    arguments: dict[str, str] = {}
    last, depth = "", None
    for line in filter(str.strip, lines):
        indent = len(line) - len(line.lstrip())
        match = ARGUMENT.match(line)
        if match and (depth is None or indent <= depth):
            last, depth = match[1], indent
            arguments[last] = match[2].strip()
        elif last:
            arguments[last] = f"{arguments[last]} {line.strip()}".strip()
    return arguments
