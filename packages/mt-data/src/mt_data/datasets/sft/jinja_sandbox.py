"""Jinja as chat templates need it. Imported only when a template is used."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, Undefined, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from mt_core.errors import ConfigError, DataError

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
        tags = environment.parse(source).find_all(nodes.ExtensionAttribute)
        has_marks = any(node.identifier == _Generation.identifier for node in tags)
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
        inside, separator, outside = piece.partition(_CLOSE)
        if bool(separator) != bool(number) or _CLOSE in outside:
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


# -- limits on size and time: a template comes with a downloaded tokenizer ---------------------------
#
# Jinja's sandbox limits `range` alone. Here operators, filters, calls and loops count against a budget of each
# rendering: a text that is doubled forty times, a number as wide as the memory and loops within loops end with a
# sentence.

SECONDS = 2.0
"""Processor time of a rendering: on a loaded machine a good template may wait longer than that."""
CHARACTERS = 64 << 20
"""All texts and lists together that a rendering makes."""
MEMBER = 16
"""Characters that a member of what is joined counts for."""
LARGEST_NUMBER = 1 << 20
"""Largest width, count or repetition."""
LONGEST_SOURCE = 4 << 20
_GROWING = frozenset(["join", "replace", "indent", "format", "center", "wordwrap", "batch", "slice", "round", "tojson"])
"""Filters whose result may be longer than what they are given."""
_WIDTHS = re.compile(r"\d+")


class LimitError(TemplateError):
    """The template asks for more than a conversation takes."""


class Budget(threading.local):
    """What is left to a rendering; each thread has its own."""

    def __init__(self) -> None:
        self._left, self._end = CHARACTERS, float("inf")

    @contextmanager
    def new(self) -> Any:
        self._left, self._end = CHARACTERS, time.thread_time() + SECONDS
        yield

    def take(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise LimitError(f"its texts are longer than {CHARACTERS} characters together")
        self.check_time()

    def check_time(self) -> None:
        if time.thread_time() > self._end:
            raise LimitError(f"it takes longer than {SECONDS:g} s of processor time")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """An environment whose templates have a budget."""

    # Jinja computes expressions of constants when it compiles, but not those that a sandbox intercepts.
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        self.budget = Budget()
        super().__init__(**options)
        self.add_extension(_Counted)
        self.filters = {name: self._limited(name, function) for name, function in self.filters.items()}
        del self.globals["lipsum"]

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = self._limited(name, function)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            self.budget.take(len(left) + len(right))
        elif operator == "*":
            self.budget.take(_product_size(left, right))
        elif operator == "**" and abs(right) * _bits(left) > LARGEST_NUMBER:
            raise LimitError(f"a power has more than {LARGEST_NUMBER} bits")
        elif operator == "%" and isinstance(left, str):
            self._count_format(left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as Jinja has it
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes):
            __self._count_text(getattr(__obj, "__name__", ""), owner, args, kwargs)
        __self.budget.check_time()
        return super().call(__context, __obj, *args, **kwargs)

    def _parse(self, source: str, name: Any, filename: Any) -> nodes.Template:
        if len(source) > LONGEST_SOURCE:
            raise LimitError(f"it has {len(source)} characters; {LONGEST_SOURCE} are allowed")
        tree = super()._parse(source, name, filename)
        extension = next(entry for entry in self.extensions.values() if isinstance(entry, _Counted))
        return _Counting(extension).visit(tree)

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        kind = getattr(function, "jinja_pass_arg", None)

        # With the context: a filter of constants is not computed when the template is compiled.
        @pass_context
        @wraps(function, updated=())
        def filtered(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if name in _GROWING:
                if name == "join" and not isinstance(value, str):
                    value = list(value)
                self._count_text(name, value, args, kwargs)
            first = {"context": context, "eval_context": context.eval_ctx, "environment": self}
            injected = [] if kind is None else [first[kind.name]]
            return function(*injected, value, *args, **kwargs)

        return filtered

    def _count_text(self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take what a filter or a method of a text will make at most. Raises LimitError."""
        arguments = [*args, *kwargs.values()]
        if any(isinstance(entry, int) and abs(entry) > LARGEST_NUMBER for entry in arguments):
            raise LimitError(f"{name} with a number above {LARGEST_NUMBER}")
        if name in ("format", "format_map"):
            self._count_format(str(value), arguments)
            return
        size = len(value) if isinstance(value, Sized) else 0
        longest = max((len(entry) for entry in arguments if isinstance(entry, Sized)), default=0)
        widest = max((abs(entry) for entry in arguments if isinstance(entry, int)), default=0)
        if name == "join":
            members = next((entry for entry in arguments if not isinstance(entry, str)), value)
            members = members if isinstance(members, list | tuple | str) else []
            # Before their lengths are added up, which takes as long as many characters for each.
            self.budget.take(MEMBER * len(members))
            self.budget.take(sum(map(_length, members)) + len(members) * (longest if members is value else size))
        elif name == "replace":
            old, new = (*args, "", "")[:2]
            occurrences = value.count(old) if isinstance(value, str) and isinstance(old, str) else size
            self.budget.take(size + occurrences * _length(new))
        elif name in ("indent", "expandtabs"):
            lines = sum(map(str(value).count, "\n\t")) + 1
            self.budget.take(size + lines * max(longest, widest))
        elif name == "tojson":
            self.budget.take(self._json_size(value, widest))
        else:
            self.budget.take(size + longest + widest)

    def _json_size(self, value: Any, indent: int, depth: int = 1) -> int:
        self.budget.check_time()
        inner: Iterable[Any] = ()
        if isinstance(value, dict):
            inner = chain.from_iterable(value.items())
        elif isinstance(value, list | tuple):
            inner = value
        return 2 + indent * depth + _length(value) + sum(self._json_size(entry, indent, depth + 1) for entry in inner)

    def _count_format(self, form: str, values: Iterable[Any]) -> None:
        entries = list(values)
        numbers = [int(digits) if len(digits) < 9 else LARGEST_NUMBER + 1 for digits in _WIDTHS.findall(form)]
        numbers += [abs(entry) for entry in entries if isinstance(entry, int)] if "*" in form else []
        if max(numbers, default=0) > LARGEST_NUMBER:
            raise LimitError(f"a format with a number above {LARGEST_NUMBER}")
        places = form.count("%") + form.count("{")
        self.budget.take(len(form) + sum(numbers) + max(map(_length, entries), default=0) * max(places, 1))


class _Counted(Extension):
    """Calls that are put into a template's tree."""

    def tick(self) -> None:
        self.environment.budget.take(1)  # type: ignore[attr-defined]

    def concatenated(self, *values: Any) -> str:
        texts = [str(value) for value in values]
        self.environment.budget.take(sum(map(len, texts)))  # type: ignore[attr-defined]
        return "".join(texts)


class _Counting(NodeTransformer):
    """Loops and macros count their rounds, `a ~ b` its characters."""

    def __init__(self, extension: _Counted) -> None:
        self._extension = extension

    def _with_tick(self, node: Any) -> Any:
        self.generic_visit(node)
        tick = nodes.ExprStmt(self._extension.call_method("tick"))
        node.body.insert(0, tick.set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _with_tick  # noqa: N815 - NodeTransformer looks for these names

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._extension.call_method("concatenated", node.nodes, lineno=node.lineno)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 20


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 64


def _product_size(left: Any, right: Any) -> int:
    for many, count in ((left, right), (right, left)):
        if isinstance(many, str | list | tuple) and isinstance(count, int):
            return len(many) * max(count, 0)
    return (_bits(left) + _bits(right)) // 8
