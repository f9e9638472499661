"""For commands of any distribution: the plugin host, and checks of what is installed. Imports nothing heavy."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Protocol, get_args, get_origin, get_type_hints

from mt_core.errors import PluginError
from mt_core.plugins import STRICT_VARIABLE, PluginHost, load_plugins
from mt_core.specs import PLAIN_MODULE

INSTALL = {"torch": '"mt-core[train]"'}
"""What to install for a name, where that is not the name itself."""
REST_OF_LINE = "ARGUMENTS..."
"""Metavar of an option that takes the rest of the line, of any command of `mt` that is a function."""
WORDS = "mt.words"
"""Key of a context's `meta`: the command line behind `mt`, as typed."""
KIND_BROUGHT = {"mt-models": "models", "mt-data": "datasets", "mt-ckpt": "checkpoint_savers"}
"""A distribution that is named where a kind of thing is missing; any other plugin may bring it instead."""


class CommandContext(Protocol):
    """typer.Context, as far as it is needed here: mt-core does not depend on typer."""

    @property
    def meta(self) -> Any: ...

    def find_object(self, object_type: type[Any], /) -> Any: ...


def host_of(context: CommandContext) -> PluginHost:
    """The host that `mt` was built from; a new one where a command is called outside of `mt`."""
    return context.find_object(PluginHost) or load_plugins(strict=False)


@contextmanager
def log_on_stderr(active: bool) -> Iterator[None]:
    """What the block prints goes to the standard error, that of processes it starts included: with --json the standard
    output is JSON alone. Does nothing where `active` is false."""
    if not active:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def typed_words(context: CommandContext) -> list[str]:
    """The command line behind `mt`, for another process that runs the same: names of the command, and its arguments."""
    return list(context.meta.get(WORDS, []))


def is_strict() -> bool:
    """Whether MT_PLUGINS_STRICT makes a missing plugin an error."""
    return os.environ.get(STRICT_VARIABLE, "") not in ("", "0")


def need(*distributions: str, command: str) -> None:
    """Raise PluginError, saying what to install, if one of the distributions is missing.

    mt-models, mt-data and mt-ckpt are not missed when another plugin registers a model family, a data set
    or a checkpoint saver.
    """
    # find_spec imports nothing of a top-level package.
    missing = [name for name in distributions if find_spec(name.replace("-", "_")) is None]
    if missing:
        missing = _not_replaced(missing)
    if missing:
        install = " ".join(INSTALL.get(name, name) for name in missing)
        raise PluginError(f"{command} needs {listed(missing)}; pip install {install}")


def _not_replaced(missing: list[str]) -> list[str]:
    host = load_plugins()
    # mt-core's own family stands for models that programs give; it brings none.
    brought = {name: set(host.registry(kind).names()) - {PLAIN_MODULE} for name, kind in KIND_BROUGHT.items()}
    return [name for name in missing if not brought.get(name)]


def listed(names: list[str]) -> str:
    """ "a, b and c" """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


class Help:
    """Annotation of a dataclass's field that `with_fields` makes an option of: its help, and what else typer.Option
    takes. For dataclasses of a library, which do not import typer."""

    def __init__(self, text: str, *names: str, **settings: Any) -> None:
        self.text, self.names, self.settings = text, names, settings


def with_fields(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of each parameter that is a dataclass in its place, as options.

    So options that several commands share, or that a library has too, are declared once, with their defaults. Fields
    are annotated as typer's options are, or with `Help`.
    """
    groups: dict[str, Any] = {}
    parameters = []
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            parameters += _options_of(hints[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    # typer reads both, and would follow __wrapped__ to the command itself.
    del call.__wrapped__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _options_of(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    signature = inspect.signature(group).parameters
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=signature[field.name].default,
            annotation=_as_option(hints[field.name]),
        )
        for field in fields(group)
    ]


def _as_option(hint: Any) -> Any:
    """The annotation with typer's option in place of `Help`."""
    described = get_args(hint)[1] if get_origin(hint) is Annotated else None
    if not isinstance(described, Help):
        return hint
    # Only modules of commands, which import typer themselves, come here.
    from typer import Option

    return Annotated[get_args(hint)[0], Option(*described.names, help=described.text, **described.settings)]
