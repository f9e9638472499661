"""`mt import`: launch scripts and configurations of Megatron-LM, Bridge, NeMo and Accelerate as our configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mt_core.commands import REST_OF_LINE, host_of
from mt_core.errors import ConfigError

if TYPE_CHECKING:
    from mt_core.plugins import PluginHost
    from mt_import.other_programs import Answer
    from mt_import.result import ImportResult


def import_config(
    context: typer.Context,
    source: Annotated[
        Path | None, typer.Argument(help="Launch script, YAML file or checkpoint.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write, .toml or .json. Default: printed.")
    ] = None,
    define: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A variable of the script; repeatable.")
    ] = None,
    arg: Annotated[list[str] | None, typer.Option(metavar="VALUE", help="An argument of the script, $1 first.")] = None,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="OPTION", help="Leave this out if it cannot be done; all: any.")
    ] = None,
    entry: Annotated[
        str | None, typer.Option(help="Megatron's script: gpt, bert, t5, hybrid, retro or ict. Default: by its name.")
    ] = None,
    program: Annotated[
        str | None,
        typer.Option(metavar="NAME|LINE", help="Of a script that starts several: the end of its path, or its line."),
    ] = None,
    megatron_version: Annotated[
        Literal["main", "0.12"] | None, typer.Option(help="Whose defaults count. Default: by the arguments.")
    ] = None,
    world_size: Annotated[int | None, typer.Option(help="Processes. Default: as the source says.", min=1)] = None,
    accelerate_env: Annotated[
        bool, typer.Option("--accelerate-env", help="Read the variables of accelerate launch: MEGATRON_LM_*.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report and the configuration as JSON.")] = False,
    megatron_args: Annotated[
        list[str] | None,
        typer.Option("--megatron-args", metavar=REST_OF_LINE, help="Megatron's arguments: the rest of the line."),
    ] = None,
) -> None:
    """Translate a run of Megatron-LM, Megatron-Bridge, NeMo or Accelerate. Scripts are read, never executed."""
    from mt_import.readers.accelerate import import_environment
    from mt_import.readers.megatron import MegatronOptions, import_words
    from mt_import.sources import import_file

    host = host_of(context)
    options = MegatronOptions(entry, megatron_version, world_size, program)
    if [source is not None, megatron_args is not None, accelerate_env].count(True) != 1:
        raise ConfigError(
            "give mt import one thing: a file or folder, --accelerate-env, or --megatron-args and arguments behind it"
        )
    if answers := _other_programs(source, megatron_args, _definitions(define or []), arg or []):
        for answer in answers:
            typer.echo(answer.text())
        return
    if accelerate_env:
        result = import_environment(os.environ)
    elif source is None:
        result = import_words(megatron_args or [], host, options)
    else:
        result = import_file(source, host, define=_definitions(define or []), arguments=arg or (), options=options)
    _finish(result, output, allow or [], host, as_json=as_json)


def _other_programs(
    source: Path | None, words: list[str] | None, define: dict[str, str], arguments: list[str]
) -> list[Answer]:
    """What answers tasks/main.py and the checkpoint converter, which train no configuration."""
    from mt_import.other_programs import answer_script, answer_words, is_other_program
    from mt_import.sources import FILES

    if words is not None:
        return [answer_words(words)] if is_other_program(words) else []
    if source is None or not source.is_file() or source.suffix.lower() in FILES:
        return []
    return answer_script(source, define, arguments)


def _definitions(texts: list[str]) -> dict[str, str]:
    definitions = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--define {text}: expected NAME=VALUE")
        definitions[name] = value
    return definitions


def _finish(result: ImportResult, output: Path | None, allowed: list[str], host: PluginHost, *, as_json: bool) -> None:
    """Report, check and write. The report goes where the configuration does not."""
    from mt_import.output import configuration_text, report_json, report_text, write_configuration
    from mt_import.result import check_result

    text = report_json(result, output, allowed) if as_json else report_text(result, output)
    # Standard output is the configuration where it is printed, so that it can be redirected into a file.
    typer.echo(text, err=output is None and not as_json)
    if refused := result.refused_unless(allowed):
        typer.echo(f"\nnot written: {len(refused)} cannot be done; --allow OPTION leaves one out", err=True)
        raise typer.Exit(1)
    # Before it is written: a file that training would refuse is not left behind.
    check_result(result, host)
    if output is not None:
        write_configuration(result.sections, output)
    elif not as_json:
        typer.echo(configuration_text(result.sections, ".toml"), nl=False)
