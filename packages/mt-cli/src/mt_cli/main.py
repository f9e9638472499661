"""The entry point `mt`: reads the arguments, runs the command, turns errors into messages and exit codes.

Exit codes: 0 done; 1 a defect (with a traceback); 2 a wrong option or configuration; 75 training that a signal ended
with a checkpoint; 130 interrupted; others are those of the errors in `mt_core.errors`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from mt_cli.app import build_group
from mt_core.errors import MtError
from mt_core.plugins import load_plugins

DEBUG_OPTION = "--debug"
DEBUG_VARIABLE = "MT_DEBUG"
INTERRUPTED = 130
COMPLETION = "_MT_COMPLETE"
"""Variable by which the shell asks for completions."""


def main() -> None:
    """Run `mt` with the arguments of this process, and exit."""
    arguments, debug = take_debug(sys.argv[1:])
    sys.exit(run(arguments, debug=debug))


def run(arguments: Sequence[str], *, debug: bool = False) -> int:
    """The exit code of `mt` with these arguments. Raises what is no MtError, and with `debug` also those."""
    try:
        if COMPLETION in os.environ:
            from typer.completion import completion_init

            # The script that --install-completion wrote for the shell expects typer's format of completions.
            completion_init()
        host = load_plugins(strict=False)  # strictness applies to the command that runs, not to finding it
        # obj: commands find the host in their context (mt_core.commands.host_of) instead of loading the plugins again.
        build_group(host).main(args=list(arguments) or ["--help"], prog_name="mt", obj=host)
    except SystemExit as stop:  # how typer ends, also after a wrong option
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except MtError as error:
        if debug:
            raise
        show_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def take_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Arguments without --debug, which may stand anywhere before `--`; and whether it was given, or MT_DEBUG is."""
    # By hand and not by typer: `run` needs it for errors that arise outside of any command, such as those of parsing.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = [argument for argument in arguments[:end] if argument != DEBUG_OPTION]
    debug = len(options) < end or os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
    return [*options, *arguments[end:]], debug


def show_error(error: MtError) -> None:
    """`error: message` on standard error; further lines are indented under the first."""
    typer.secho("error: ", fg=typer.colors.RED, bold=True, err=True, nl=False)
    typer.echo(str(error).replace("\n", "\n       "), err=True)
