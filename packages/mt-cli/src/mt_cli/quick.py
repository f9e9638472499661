"""Parameters that cost nothing when they are not given, and options that take the rest of the line.

typer converts also a value that is missing, and imports pydantic to do so, even for --help: a third of the
time of `mt --help`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from typer.core import TyperCommand

from mt_core.commands import REST_OF_LINE


class QuickParameters:
    """Mixed into a typer command or group: options that were not given are None without any conversion."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            # get_params is called several times for one command; the check of the instance wraps each parameter once.
            if "process_value" not in vars(parameter) and may_be_none(parameter):
                parameter.process_value = partial(process_value, parameter, parameter.process_value)
        return parameters


class QuickCommand(QuickParameters, TyperCommand):
    """A command made of a function."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = next((name for p in self.params if getattr(p, "metavar", None) == REST_OF_LINE for name in p.opts), None)
        return super().parse_args(ctx, args if rest is None else one_by_one(args, rest))


def one_by_one(arguments: Sequence[str], option: str) -> list[str]:
    """`option` takes every word behind it, options of other programs included: each becomes a value of its own."""
    if option not in arguments:
        return list(arguments)
    place = arguments.index(option)
    # With "=", so that a word which begins with dashes is a value and not an option of mt.
    return [*arguments[:place], *(f"{option}={word}" for word in arguments[place + 1 :])]


def may_be_none(parameter: Any) -> bool:
    """Not a list, and not required."""
    return parameter.nargs == 1 and not parameter.required and not getattr(parameter, "multiple", False)


def process_value(parameter: Any, convert: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
    if value is not None:
        return convert(context, value)
    return parameter.callback(context, parameter, None) if parameter.callback else None
