"""The tree of commands, from what plugins register. A command's code is imported when it is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from mt_cli import plugin
from mt_cli.command_homes import COMMAND_HOMES
from mt_cli.machine import version_lines
from mt_core.commands import REST_OF_LINE, WORDS, host_of, is_strict
from mt_core.errors import MtError, PluginError
from mt_core.plugins import ALLOW_LIST_VARIABLE, PluginHost, load_plugins
from mt_core.specs import COMMANDS, CommandSpec

# -- parameters that cost nothing when not given, and options that take the rest of the line ---------
#
# typer converts also a value that is missing, and imports pydantic to do so, even for --help: a third of the
# time of `mt --help`.


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


HELP = "Train, convert, plan and verify large transformer models."
DIAGNOSIS = ("plugins", "doctor")
"""Commands that run whatever is wrong with plugins, since they show it."""


def _show_version(context: typer.Context, wanted: bool) -> None:
    if wanted:
        typer.echo("\n".join(version_lines(host_of(context))))
        raise typer.Exit


def _install_completion(context: typer.Context, wanted: bool) -> None:
    if wanted:
        from typer.completion import install

        shell, path = install(prog_name="mt")
        typer.echo(f"Completion for {shell} is in {path}; it works in the next shell.")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the versions of mt.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; also MT_DEBUG=1.")] = False,
    install_completion: Annotated[
        bool,
        typer.Option("--install-completion", callback=_install_completion, help="Complete commands in this shell."),
    ] = False,
) -> None:
    """Options before any command. --debug is listed here, and `mt_cli.main.take_debug` reads it."""


class CommandGroup(QuickParameters, TyperGroup):
    """`mt` itself."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Kept before parsing consumes them: commands that start other processes pass the same words on (typed_words).
        ctx.meta[WORDS] = list(args)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        own_names = [spec.name for spec in plugin.mt_register_commands()]
        home = COMMAND_HOMES.get(args[0]) or ("mt-cli" if args[0] in own_names else None)
        # A known command of a distribution that is not installed, or whose plugin failed: better than "No such
        # command".
        if home and args[0] not in self.commands:
            _refuse_absent(args[0], home, host_of(ctx))
        return super().resolve_command(ctx, args)


def _refuse_absent(command: str, home: str, host: PluginHost) -> NoReturn:
    host.require_known_names()
    raise PluginError(f"mt {command} is a command of {home}, {_why_absent(home, host)}")


def _why_absent(distribution: str, host: PluginHost) -> str:
    problems = [
        problem for plugin in host.plugins if plugin.distribution == distribution for problem in plugin.problems
    ]
    if problems:
        return f"which is missing: {problems[0].message}"
    return f"which is not installed (pip install {distribution})"


# `mt --help` shows names and documents of all commands from their specs; importing the commands themselves would import
# torch. The import happens in make_context, which click calls for the one command that runs.
class DeferredCommand(TyperCommand):
    """A command of a plugin, known by its name and document until it is called."""

    def __init__(self, spec: CommandSpec, host: PluginHost) -> None:
        super().__init__(spec.name.rpartition(" ")[2], help=escape(spec.doc))
        self.spec = spec
        self.host = host

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of the real command, which is what runs from here on."""
        # Here and not in `main`: only a command that really runs may be refused, not help or completion.
        if self.spec.name not in DIAGNOSIS:
            self.host.require_known_names()
            if is_strict():
                load_plugins()  # raises at the first problem
        if parent is not None:
            # setdefault: a command below a group must not replace the words of the group, which hold its own.
            parent.meta.setdefault(WORDS, [info_name, *args])
        # The context belongs to the loaded command, so click invokes that one and never this placeholder.
        return self.load().make_context(info_name, args, parent=parent, **extra)

    def load(self) -> Any:
        """Import the command. Raises PluginError, which names the plugin, if that fails or two plugins have it."""
        owners = self.host[COMMANDS].owners(self.spec.name)
        # `get` raises for a name that two plugins register. Without an owner (DIAGNOSIS while the plugin of mt-cli is
        # left out or broken) the spec at hand is used.
        spec = self.host[COMMANDS].get(self.spec.name) if owners else self.spec
        try:
            command = as_command(spec.name.rpartition(" ")[2], spec.app.load())
            return with_subcommands(with_brackets(command), spec.name, self.host)
        except MtError:
            raise
        except Exception as error:  # another's code may raise anything while it is imported
            brought_by = owners[0].label if owners else "mt-cli"
            raise PluginError(
                f"mt {spec.name}, brought by {brought_by}, cannot be loaded: {type(error).__name__}: {error}"
            ) from error


class AbsentCommand(TyperCommand):
    """A command that a distribution adds to another's group, and that is not there."""

    def __init__(self, name: str, home: str, host: PluginHost) -> None:
        super().__init__(name.rpartition(" ")[2], hidden=True)
        self.full_name, self.home, self.host = name, home, host

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        _refuse_absent(self.full_name, self.home, self.host)


def build_group(host: PluginHost) -> CommandGroup:
    """The command `mt`, with a sub-command for each one that the host's plugins register."""
    settings = {"help_option_names": ["-h", "--help"]}
    # typer's own options for completion would import pydantic; _install_completion stands for them.
    app = typer.Typer(
        cls=CommandGroup, help=HELP, epilog=_epilog(host), context_settings=settings, add_completion=False
    )
    app.callback()(_options)
    group = get_command(app)
    assert isinstance(group, CommandGroup)
    for spec in ordered_commands(host):
        group.add_command(DeferredCommand(spec, host))
    return group


def with_subcommands(command: Any, name: str, host: PluginHost) -> Any:
    """The group with the commands that other plugins add to it, under names such as "verify generation"."""
    for spec in host[COMMANDS]:
        if spec.name.startswith(f"{name} "):
            command.add_command(DeferredCommand(spec, host), spec.name.rpartition(" ")[2])
    for absent, home in COMMAND_HOMES.items() if isinstance(command, TyperGroup) else ():
        if absent.startswith(f"{name} ") and absent.rpartition(" ")[2] not in command.commands:
            command.add_command(AbsentCommand(absent, home, host))
    return command


def ordered_commands(host: PluginHost) -> list[CommandSpec]:
    """mt-cli's own commands in their order, then the others by name; one for each name."""
    own_commands = plugin.mt_register_commands()
    registered = {spec.name: spec for spec in host[COMMANDS] if " " not in spec.name}
    # An allow-list can leave mt-cli's own plugin out; the commands that show why stay.
    first = [spec for spec in own_commands if spec.name in registered or spec.name in DIAGNOSIS]
    others = sorted(registered.keys() - {spec.name for spec in own_commands})
    return first + [registered[name] for name in others]


def as_command(name: str, app: Any) -> Any:
    """What a CommandSpec's `app` gives, a typer app or a function with typer annotations, as a command."""
    holder = typer.Typer(add_completion=False)
    if isinstance(app, typer.Typer):
        holder.add_typer(app, name=name)
        # Through a holder, since a typer app has no name of its own until it is added to another.
        return get_group(holder).commands[name]
    if not callable(app):
        raise TypeError(f"expected a typer app or a function, got {type(app).__name__}")
    # A command that reads its words itself says so beside its function, as `mt launch` does.
    holder.command(name, cls=QuickCommand, context_settings=getattr(app, "context_settings", None))(app)
    return get_command(holder)


def with_brackets(command: Any) -> Any:
    """The command, and those below it, with help texts in which square brackets are shown as they are."""
    for described in (command, *command.params):
        if getattr(described, "help", None):
            described.help = escape(described.help)
    for inner in getattr(command, "commands", {}).values():
        with_brackets(inner)
    return command


def escape(text: str) -> str:
    """Text whose square brackets are shown as they are."""
    # rich reads [name] in help texts as markup and would drop it.
    return text.replace("[", r"\[")


def _epilog(host: PluginHost) -> str:
    """A word about plugins that are missing, or nothing."""
    _ = host[COMMANDS]  # so that a failing registration of commands is known
    left_out = {p.name for p in host.plugins if any(problem.stage == "allow-list" for problem in p.problems)}
    broken = [plugin.name for plugin in host.plugins if plugin.problems and plugin.name not in left_out]
    sentences = [f"Left out by {ALLOW_LIST_VARIABLE}: {', '.join(sorted(left_out))}."] if left_out else []
    sentences += [f"Missing, or missing a part: {', '.join(broken)}. See mt plugins."] if broken else []
    return escape(" ".join(sentences))
