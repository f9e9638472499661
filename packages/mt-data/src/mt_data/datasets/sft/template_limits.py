"""How much a chat template may write and how long it may take: a template comes with a downloaded tokenizer.

Jinja's sandbox limits `range` alone. Here operators, filters, calls and loops count against a budget of each rendering:
a text that is doubled forty times, a number as wide as the memory and loops within loops end with a sentence.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Sized
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

SECONDS = 2.0
CHARACTERS = 64 << 20
"""All texts and lists together that a rendering makes."""
MEMBER = 16
"""Characters that a member of what is joined counts for."""
LARGEST_NUMBER = 1 << 20
"""As a width, a count or a repetition."""
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
        self._left, self._end = CHARACTERS, time.monotonic() + SECONDS
        yield

    def take(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise LimitError(f"its texts are longer than {CHARACTERS} characters together")
        self.check_time()

    def check_time(self) -> None:
        if time.monotonic() > self._end:
            raise LimitError(f"it takes longer than {SECONDS:g} s")


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
            given = [] if kind is None else [first[kind.name]]
            return function(*given, value, *args, **kwargs)

        return filtered

    def _count_text(self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take what a filter or a method of a text will make at most. Raises LimitError."""
        given = [*args, *kwargs.values()]
        if any(isinstance(entry, int) and abs(entry) > LARGEST_NUMBER for entry in given):
            raise LimitError(f"{name} with a number above {LARGEST_NUMBER}")
        if name in ("format", "format_map"):
            self._count_format(str(value), given)
            return
        size = len(value) if isinstance(value, Sized) else 0
        longest = max((len(entry) for entry in given if isinstance(entry, Sized)), default=0)
        widest = max((abs(entry) for entry in given if isinstance(entry, int)), default=0)
        if name == "join":
            members = next((entry for entry in given if not isinstance(entry, str)), value)
            members = members if isinstance(members, list | tuple | str) else []
            # Before their lengths are added up, which takes as long as many characters for each.
            self.budget.take(MEMBER * len(members))
            self.budget.take(sum(map(_length, members)) + len(members) * (longest if members is value else size))
        elif name == "replace":
            old, new = (*args, "", "")[:2]
            found = value.count(old) if isinstance(value, str) and isinstance(old, str) else size
            self.budget.take(size + found * _length(new))
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
        given = list(values)
        numbers = [int(digits) if len(digits) < 9 else LARGEST_NUMBER + 1 for digits in _WIDTHS.findall(form)]
        numbers += [abs(entry) for entry in given if isinstance(entry, int)] if "*" in form else []
        if max(numbers, default=0) > LARGEST_NUMBER:
            raise LimitError(f"a format with a number above {LARGEST_NUMBER}")
        places = form.count("%") + form.count("{")
        self.budget.take(len(form) + sum(numbers) + max(map(_length, given), default=0) * max(places, 1))


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
