"""Jinja as chat templates need it. Imported only when a template is used."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from mt_core.errors import ConfigError, DataError
from mt_data.datasets.sft.template_limits import Budget, LimitedEnvironment, LimitError

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Unicode's noncharacters stand around what a template marks, until it is rendered."""


class _RefusalError(TemplateError):
    """What a template says with raise_exception."""


class _LoudUndefined(Undefined):
    """A name that is not there may be tested, but not written: Jinja would write nothing in its place."""

    def __str__(self) -> str:
        self._fail_with_undefined_error()


class _Generation(Extension):
    """`{% generation %}answer{% endgeneration %}` marks what the model is to generate."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # Jinja calls `mark` with a function that renders the body, so marks follow whatever loops and filters do with
        # the text.
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


class CompiledTemplate:
    """A template and whether it marks answers."""

    def __init__(self, template: Template, has_marks: bool, name: str, budget: Budget) -> None:
        self.has_marks = has_marks
        self._budget = budget
        self._template = template
        self._name = name

    def render(self, values: Mapping[str, Any], where: str, advice: str) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the (start, end) of what is marked.

        DataError, with the advice what to change, when the template fails on the values.
        """
        try:
            with self._budget.new():
                return _unmark(self._template.render(values), where)
        except MemoryError:
            raise DataError(f"{where}: {self._name} needs too much memory; {advice}") from None
        except _FAILURES as error:
            raise DataError(f"{where}: {self._name} refuses the conversation: {error}; {advice}") from error


_FAILURES = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""What an expression of a template raises for values that it was not written for."""


def compile_template(source: str, name: str) -> CompiledTemplate:
    """Raises ConfigError, with the line, for a source that is no Jinja template."""
    # A template comes with a downloaded tokenizer: the sandbox refuses access to Python's internals, and changes of the
    # messages. trim_blocks, lstrip_blocks and loop controls are as transformers sets them for chat templates.
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, undefined=_LoudUndefined, extensions=[_Generation, loopcontrols]
    )
    environment.add_filter("tojson", _tojson)
    environment.globals["raise_exception"] = _raise_exception
    try:
        # Looked for in the syntax tree, since the text of the tag may be part of a comment or a string.
        found = environment.parse(source).find_all(nodes.ExtensionAttribute)
        has_marks = any(node.identifier == _Generation.identifier for node in found)
        return CompiledTemplate(environment.from_string(source), has_marks, name, environment.budget)
    except TemplateSyntaxError as error:
        raise ConfigError(f"{name}, line {error.lineno}: no valid Jinja template ({error.message})") from error
    except LimitError as error:
        raise ConfigError(f"{name}: {error}") from error
    except (RecursionError, MemoryError):
        raise ConfigError(f"{name}: its expressions or blocks are nested too deeply, or too long") from None


def _unmark(text: str, where: str) -> tuple[str, list[tuple[int, int]]]:
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    length = 0
    # Each piece but the first follows an opening mark and must hold exactly one closing mark: "a<b>c" -> "a", "b>c".
    for number, piece in enumerate(text.split(_OPEN)):
        inside, found, outside = piece.partition(_CLOSE)
        if bool(found) != bool(number) or _CLOSE in outside:
            raise DataError(
                f"{where} holds U+FDD0 or U+FDD1, which are no characters of any text, or its template puts one "
                "{% generation %} into another"
            )
        if number:
            spans.append((length, length + len(inside)))
        parts += [inside, outside]
        # Spans are places in the text without marks.
        length += len(inside) + len(outside)
    return "".join(parts), spans


def _raise_exception(message: str) -> NoReturn:
    raise _RefusalError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False, **others: Any
) -> str:
    """Plain JSON; Jinja's own filter would write <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys, **others)
