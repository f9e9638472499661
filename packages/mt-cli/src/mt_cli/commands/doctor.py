"""`mt doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mt_cli.machine import distribution_versions
from mt_core.commands import host_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from mt_cli.machine import Finding
    from mt_core.plugins import PluginHost


def doctor(
    context: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Look at this machine: Python, torch, devices, dtypes, optional kernels and packages, plugins."""
    from mt_cli.machine import DATA_PACKAGES, KERNELS, examine, system_facts, torch_facts

    host = host_of(context)
    # One call for both, so that all imports run at the same time.
    findings = examine([*KERNELS, *DATA_PACKAGES])
    kernels, packages = findings[: len(KERNELS)], findings[len(KERNELS) :]
    facts = {
        "system": system_facts(),
        "torch": torch_facts(),
        "distributions": distribution_versions(host),
        "plugin_problems": plugin_problems(host),
    }
    if as_json:
        optional = {"kernels": _as_dicts(kernels), "packages": _as_dicts(packages)}
        typer.echo(json.dumps({**facts, **optional}, indent=2))
    else:
        _print(facts, kernels, packages)


def plugin_problems(host: PluginHost) -> list[str]:
    """One line for each plugin, or part of one, that is missing, and for each name registered twice."""
    doubled = [
        f"{kind.replace('_', ' ')}: {name} is registered by {' and '.join(owner.label for owner in owners)}"
        for kind, name, owners in host.duplicates()
    ]
    missing = [
        f"{plugin.label}, {problem.stage}: {problem.message}" for plugin in host.plugins for problem in plugin.problems
    ]
    return missing + doubled


def _as_dicts(findings: list[Finding]) -> list[dict[str, Any]]:
    return [
        {**asdict(finding), "package": finding.package.module, "gives": finding.package.gives} for finding in findings
    ]


def _print(facts: dict[str, Any], kernels: list[Finding], packages: list[Finding]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    _section(console, "machine", _fact_table(facts["system"]))
    _section(console, "torch", _fact_table(facts["torch"]))
    _section(console, "optional kernels", _finding_table(kernels))
    _section(console, "optional packages", _finding_table(packages))
    _section(console, "distributions", _fact_table(facts["distributions"]))
    for problem in facts["plugin_problems"]:
        console.print(problem, style="red", markup=False)
    if not facts["plugin_problems"]:
        console.print("All plugins are loaded.", style="green")


def _section(console: Console, title: str, table: Table) -> None:
    console.print(title, style="bold")
    console.print(table)
    console.print()


def _fact_table(facts: dict[str, str]) -> Table:
    from rich.text import Text

    table = _grid()
    for name, value in facts.items():
        table.add_row(Text(f"  {name}", "dim"), Text(value))
    return table


def _finding_table(findings: list[Finding]) -> Table:
    """Name, state, and what the package gives, or the reason why it cannot."""
    from rich.text import Text

    table = _grid()
    for finding in findings:
        style = {"usable": "green", "unusable": "red", "missing": "dim"}[finding.state]
        state = finding.version or "usable" if finding.state == "usable" else finding.state
        about = Text(finding.package.gives, "" if finding.state == "usable" else "dim")
        if finding.reason:
            unusable = finding.state == "unusable"
            about = Text(f"installed but unusable: {finding.reason}" if unusable else finding.reason, style)
        table.add_row(Text(f"  {finding.package.module}"), Text(state, style), about)
    return table


def _grid() -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=16)
    return table
