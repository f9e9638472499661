"""`mt plugins`."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mt_core.commands import host_of, is_strict
from mt_core.errors import ConfigError, did_you_mean
from mt_core.plugins import ALLOW_LIST_VARIABLE, Plugin, PluginHost, mt_core_version

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


INDENT = "  "
GAP = 2
"""Spaces between columns."""
MIN_DOC_WIDTH = 20


def plugins(
    context: typer.Context,
    kind: Annotated[str | None, typer.Option(help="Only this kind, for instance models.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List plugins and what they register, with the owner of each thing and why one is missing."""
    host = host_of(context)
    if kind is not None and kind not in host.kinds:
        raise ConfigError(f"--kind {kind}: kinds are {', '.join(host.kinds)}{did_you_mean(kind, host.kinds)}")
    listed = listing(host, [kind] if kind else list(host.kinds))
    if as_json:
        typer.echo(json.dumps(listed, indent=2))
    else:
        _print(listed)
    # With MT_PLUGINS_STRICT the command serves as a check in scripts: it prints everything and then fails.
    if is_strict() and (listed["duplicates"] or any(_is_fault(p) for p in listed["plugins"])):
        raise typer.Exit(1)


def listing(host: PluginHost, kinds: list[str]) -> dict[str, Any]:
    """Everything that `mt plugins` shows, as JSON values."""
    registrations = [
        {
            "kind": kind,
            "name": registration.spec.name,
            "doc": registration.spec.doc,
            "plugin": registration.plugin.name,
            "distribution": registration.plugin.distribution,
            "version": registration.plugin.version,
        }
        for kind in kinds
        for registration in host.registry(kind).registrations
    ]
    duplicates = [
        {"kind": kind, "name": name, "plugins": [plugin.name for plugin in owners]}
        for kind, name, owners in host.duplicates()  # loads every kind, so that it finds all problems
        if kind in kinds
    ]
    return {
        "mt_core": mt_core_version(),
        "allow_list": os.environ.get(ALLOW_LIST_VARIABLE),
        "strict": is_strict(),
        "plugins": [_plugin(plugin) for plugin in host.plugins],
        "registrations": registrations,
        "duplicates": duplicates,
    }


def _plugin(plugin: Plugin) -> dict[str, Any]:
    return {
        "name": plugin.name,
        "module": plugin.module,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "mt_core_range": plugin.mt_core_range,
        "loaded": plugin.loaded,
        "notes": plugin.notes,
        "problems": [{"stage": problem.stage, "message": problem.message} for problem in plugin.problems],
    }


def _is_fault(plugin: dict[str, Any]) -> bool:
    """A plugin that the allow-list leaves out is missing on purpose."""
    return any(problem["stage"] != "allow-list" for problem in plugin["problems"])


def _print(listed: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_registration_table(listed["registrations"], console.width))
    console.print()
    console.print(_plugin_table(listed))
    _print_problems(console, listed)


def _registration_table(registrations: list[dict[str, Any]], width: int) -> Table:
    """One row for each registered thing, under the name of its kind."""
    from rich.text import Text

    table = _new_table("name", "from", "what it is")
    owners = [f"{entry['distribution']} {entry['version']}" for entry in registrations]
    first = max((len(entry["name"]) + len(INDENT) for entry in registrations), default=len("name"))
    second = max((len(owner) for owner in owners), default=len("name"))
    # Given widths: measuring every cell takes longer than the rest of the command.
    widths = (first, second, max(width - first - second - 2 * GAP, MIN_DOC_WIDTH))
    for column, column_width in zip(table.columns, widths, strict=True):
        column.width = column_width
    before = ""
    for entry, owner in zip(registrations, owners, strict=True):
        if entry["kind"] != before:
            if before:
                table.add_row()
            before = entry["kind"]
            table.add_row(Text(before.replace("_", " "), style="bold"))
        table.add_row(Text(INDENT + entry["name"]), Text(owner, style="dim"), Text(entry["doc"]))
    return table


def _plugin_table(listed: dict[str, Any]) -> Table:
    table = _new_table("plugin", "distribution", "version", "needs", "state")
    for plugin in listed["plugins"]:
        needs = f"mt-core {plugin['mt_core_range']}" if plugin["mt_core_range"] else ""
        table.add_row(plugin["name"], plugin["distribution"], plugin["version"], needs, _state(plugin))
    return table


def _state(plugin: dict[str, Any]) -> str:
    if plugin["problems"] and not _is_fault(plugin):
        return f"left out by {ALLOW_LIST_VARIABLE}"
    if not plugin["loaded"]:
        return "missing"
    return "a part is missing" if plugin["problems"] else "loaded"


def _new_table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    for position, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=position == 0)
    return table


def _print_problems(console: Console, listed: dict[str, Any]) -> None:
    for plugin in listed["plugins"]:
        label = f'plugin "{plugin["name"]}" ({plugin["distribution"]} {plugin["version"]})'
        for note in plugin["notes"]:
            console.print(f"\n{label}: {note}", style="yellow", markup=False)
        for problem in plugin["problems"]:
            if problem["stage"] != "allow-list":
                console.print(f"\n{label}, {problem['stage']}: {problem['message']}", style="red", markup=False)
    for twice in listed["duplicates"]:
        owners = " and ".join(twice["plugins"])
        text = f"{twice['kind'].replace('_', ' ')}: {twice['name']} is registered by {owners}; neither is used"
        console.print(f"\n{text}", style="red", markup=False)
