"""Grammars of answers in llguidance's Lark: rules are collected while a form writes the expression of its calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mt_core.errors import ConfigError
from mt_infer.chat.tool_calls.values import Schema, alternatives, resolved, schema_of, types_of

SpecialId = Callable[[str], int | None]
"""The id of a text that is one special token of the tokenizer; None for others."""
TEXT = "/(.|\\n)*/"
NAME = "/[a-zA-Z0-9_.:-]+/"
"""Pattern of the name of an argument that no schema declares."""
SPACE = "/[ \\n]{1,4}/?"
OF_TEXTS = ("pattern", "format", "minLength", "maxLength")
"""Keywords of a schema that arguments written as plain text are not constrained by."""


def no_special(text: str) -> int | None:
    return None


class GrammarWriter:
    """Rules of one grammar. special_id: marks that are special tokens stand for no text, and are named by their ids."""

    def __init__(self, special_id: SpecialId = no_special) -> None:
        self._special_id = special_id
        self._rules: dict[str, str] = {}

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *(f"{name}: {body}" for name, body in self._rules.items())])

    def rule(self, body: str, *, lazy: bool = False) -> str:
        """The name of a rule. lazy: it ends as soon as its text is complete."""
        suffix = "[lazy]" if lazy else ""
        known = next(
            (name for name, other in self._rules.items() if other == body and name.endswith("]") == lazy), None
        )
        name = known or f"answer_part{len(self._rules)}{suffix}"
        self._rules[name] = body
        return name.removesuffix("[lazy]")

    def is_special(self, mark: str) -> bool:
        return self._special_id(mark) is not None

    def mark(self, mark: str) -> str:
        token = self._special_id(mark)
        return quoted(mark) if token is None else f"<[{token}]>"

    def until(self, mark: str, before: str = "") -> str:
        """Any text up to the mark and with it. before: what the text ends with where the mark is plain text."""
        if self.is_special(mark):
            # A text has no special tokens.
            return f"{TEXT} {self.mark(mark)}"
        return self.rule(f"{TEXT} {quoted(before + mark)}", lazy=True)

    def json(self, schema: Schema, root: Schema | None = None) -> str:
        """A value in JSON. root: the schema whose definitions it refers to."""
        known = {key: root[key] for key in ("$defs", "definitions") if root is not None and key in root}
        return self.rule(f"%json {json.dumps({**known, **schema})}")

    def value(self, schema: Schema, root: Schema, mark: str, before: str = "") -> str:
        """A value as plain text and the mark behind it: a string as it is, others in JSON."""
        schema = resolved(schema, root)
        types = types_of(schema, root)
        if values := listed_values(schema):
            return f"{either(map(literal, values))} {self._end(mark, before)}"
        if not types or "string" in types:
            return self.until(mark, before)
        return f"{self.json(schema, root)} {self._end(mark, before)}"

    def _end(self, mark: str, before: str) -> str:
        return f"{quoted(before)} {self.mark(mark)}" if before else self.mark(mark)

    def parameters(self, function: Mapping[str, Any], write: Callable[[str | None, Schema, Schema], str]) -> str:
        """Arguments one after another, in the order of the schema; those that are not required may be missing. write:
        the expression of one, by its name, its schema and the whole one; the name is None for any."""
        root = function.get("parameters") or {}
        require_enforced(function)
        names, required = declared(root)
        if names is None:
            return f"({write(None, {}, {})})*"
        each = [write(name, schema_of(root, name), root) for name in names]
        return " ".join(
            expression if name in required else f"({expression})?" for name, expression in zip(names, each, strict=True)
        )

    def separated(self, items: Sequence[tuple[str, bool]], separator: str = ",") -> str:
        """Items (expression, whether it is required) with a separator between those that are there."""
        # behind[i]: what follows the items before i, of which one is there; first[i]: of which none is.
        behind, first = "", ""
        for expression, is_required in reversed(items):
            with_it = f"{expression} {behind}"
            first = with_it if is_required else _optional(with_it, first)
            continued = f"{quoted(separator)} {with_it}"
            behind = continued if is_required else _optional(continued, behind)
            first, behind = self._named(first), self._named(behind)
        return first or '""'

    def _named(self, expression: str) -> str:
        return self.rule(expression) if expression else ""


def _optional(expression: str, otherwise: str) -> str:
    return f"({expression} | {otherwise})" if otherwise else f"({expression})?"


def declared(parameters: Schema) -> tuple[list[str] | None, frozenset[str]]:
    """Names of the parameters, None if any may be given; and of those that are required."""
    schema = resolved(parameters, parameters)
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return ([] if schema.get("additionalProperties") is False else None), frozenset()
    return list(properties), frozenset(schema.get("required") or ())


def listed_values(schema: Schema) -> list[Any]:
    """Those of `enum`, or of `const`."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) else []


def literal(value: Any) -> str:
    """A value as plain text: a string as it is, others in JSON."""
    return quoted(value if isinstance(value, str) else json.dumps(value))


def require_enforced(function: Mapping[str, Any]) -> None:
    """Raises ConfigError for a strict function with an argument whose text, as the form writes it, would be any."""
    root = function.get("parameters") or {}
    names, _ = declared(root)
    for name in names or () if function.get("strict") else ():
        if reason := _not_enforced(resolved(schema_of(root, name), root), root):
            raise ConfigError(
                f"function {function.get('name')}, argument {name}: texts of calls in the form of this model are not "
                f"constrained by {reason}; leave out the keyword or strict, or list the values by enum"
            )


def _not_enforced(schema: Schema, root: Schema) -> str | None:
    types = types_of(schema, root)
    if (types and "string" not in types) or listed_values(schema):
        return None
    named = next((key for key in OF_TEXTS if key in schema), None)
    branches = [resolved(branch, root) for branch in alternatives(schema)]
    of_branch = next((branch for branch in branches if listed_values(branch) or _not_enforced(branch, root)), None)
    return named or ("anyOf, oneOf or allOf of texts" if of_branch is not None else None)


def quoted(text: str) -> str:
    """A literal of Lark, whose escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False)


def either(expressions: Any) -> str:
    return f"({' | '.join(expressions)})"
