"""`mt models`."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mt_core.commands import host_of
from mt_core.errors import ConfigError, did_you_mean
from mt_core.specs import MODELS, PLAIN_MODULE

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from mt_cli.model_check import ModelCheck
    from mt_cli.presets import Preset
    from mt_core.config import sources as config_presets
    from mt_core.plugins import PluginHost

CHECK = "check"
SHAPE_COLUMNS = {"num_layers": "layers", "hidden_size": "hidden", "num_attention_heads": "heads"}
"""Keys of the model section that get a column, where a preset has them."""


def models(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="A family or a preset; or check.", show_default=False)] = None,
    path: Annotated[
        Path | None,
        typer.Argument(help="With check: a folder of Hugging Face's format, or its config.json.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List model families and presets with their exact parameter counts, or show one in detail. mt models check DIR
    says whether a published model is taken, and if not which field or tensor it is and why."""
    host = host_of(context)
    if name == CHECK:
        _check(path, host, as_json=as_json)
    elif path is not None:
        raise ConfigError(f"{path} is given beside {name}; a path only counts as mt models {CHECK} {path}")
    else:
        _list(name, host, as_json=as_json)


def _list(name: str | None, host: PluginHost, *, as_json: bool) -> None:
    from mt_cli.presets import measured_preset
    from mt_core.parallel.pipeline.gc_control import without_garbage_collection

    names, problems = _chosen(name, host)
    with without_garbage_collection():  # collections would take a quarter of the command
        presets = [measured_preset(preset, host) for preset in names]
    if as_json:
        typer.echo(json.dumps({**_listing(host, presets), "problems": problems}, indent=2))
    # A preset and a family may have the same name; the family is then shown.
    elif name is not None and name not in host[MODELS].names():
        _print_preset(presets[0], host)
    else:
        _print_families(host, presets, problems)


def _check(path: Path | None, host: PluginHost, *, as_json: bool) -> None:
    from mt_cli.model_check import check_model

    if path is None:
        raise ConfigError(f"mt models {CHECK} needs a folder of Hugging Face's format, or its config.json")
    check = check_model(path, host)
    if as_json:
        typer.echo(json.dumps({"taken": check.taken, **asdict(check)}, indent=2))
    else:
        _print_check(check)
    if not check.taken:
        raise typer.Exit(1)


def _print_check(check: ModelCheck) -> None:
    if check.taken:
        counted = "" if check.parameters is None else f", {check.parameters:,} parameters"
        typer.echo(f"taken: {check.model_type} is read as model.family={check.family}{counted} ({_stored(check)})")
        if check.left_out:
            parts = ", ".join(f"{pattern} ({count} tensors)" for pattern, count in check.left_out.items())
            typer.echo(f"left out, since model.family={check.family} has no such parts: {parts}")
        return
    typer.echo(f"not taken: {check.path} (model_type {check.model_type})")
    for problem in check.problems:
        typer.echo(f"  {problem.where}: {', '.join(problem.names) or '-'}\n    {problem.why}")


def _stored(check: ModelCheck) -> str:
    if check.tensors is None:
        settings = f", quantized by {check.quantization}: its settings are checked with the tensors"
        return f"config.json alone{settings if check.quantization else ''}"
    used = f"{check.tensors} tensors, all used" if not check.left_out else f"{check.tensors} tensors used"
    return used if check.quantization is None else f"{used}, quantized by {check.quantization}"


def _chosen(name: str | None, host: PluginHost) -> tuple[list[str], list[str]]:
    """Names of the presets to show; and what is wrong with others."""
    from mt_core.config.sources import installed_presets

    presets, problems = installed_presets(host)
    families = host[MODELS].names()
    if name is not None and name not in families:
        _require_known(name, [*families, *presets], presets)
        return [name], problems
    # Of two plugins' presets with one name neither is used: which one is meant is ambiguous.
    doubled = [preset for preset, owners in presets.items() if len(owners) > 1]
    problems += [f"preset {preset} is brought by {_owners(presets[preset])}" for preset in doubled]
    wanted = [preset for preset, owners in presets.items() if name is None or owners[0].family == name]
    return [preset for preset in wanted if preset not in doubled], problems


def _owners(presets: Sequence[config_presets.Preset]) -> str:
    return " and ".join(preset.plugin.label for preset in presets)


def _require_known(name: str, known: list[str], presets: Collection[str]) -> None:
    if name not in presets:
        hint = did_you_mean(name, known) or (" (mt models lists them)" if known else " (pip install mt-models)")
        raise ConfigError(f"{name} is no installed model family and no preset{hint}")


def _listing(host: PluginHost, presets: list[Preset]) -> dict[str, Any]:
    shown = {preset.family for preset in presets}
    families = [
        {"name": registration.spec.name, "doc": registration.spec.doc, "distribution": registration.plugin.distribution}
        for registration in host[MODELS].registrations
        if registration.spec.name in shown or not presets
    ]
    return {"families": families, "presets": [asdict(preset) for preset in presets]}


def _print_families(host: PluginHost, presets: list[Preset], problems: list[str]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not set(host[MODELS].names()) - {PLAIN_MODULE}:
        console.print("No model family is installed (pip install mt-models).", markup=False)
        return
    console.print(_preset_table(host, presets))
    for problem in sorted({preset.problem for preset in presets if preset.problem}):
        console.print(f"\nNot counted: {problem}", style="yellow", markup=False)
    for problem in problems:
        console.print(f"\n{problem}", style="red", markup=False)


def _preset_table(host: PluginHost, presets: list[Preset]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("preset", no_wrap=True)
    for column in ("parameters", *SHAPE_COLUMNS.values(), "sequence"):
        table.add_column(column, justify="right", no_wrap=True)
    for spec in host[MODELS]:
        mine = [preset for preset in presets if preset.family == spec.name]
        if mine:
            if table.row_count:
                table.add_row()
            table.add_row(Text(spec.name, style="bold"))
        for preset in mine:
            table.add_row(Text(f"  {preset.name}"), *_numbers(preset))
    return table


def _numbers(preset: Preset) -> list[str]:
    model = preset.values["model"]
    sequence = preset.values.get("data", {}).get("seq_length")
    count = f"{preset.size.total:,}" if preset.size else "-"
    shape = [model.get(key) for key in SHAPE_COLUMNS]
    return [count, *(str(number) if number is not None else "-" for number in (*shape, sequence))]


def _print_preset(preset: Preset, host: PluginHost) -> None:
    """The values that a preset sets, where its parameters are, and how to use it."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(preset.name, style="bold").append(f"  preset of {preset.family}", style="dim"))
    console.print(_values_table(preset))
    if preset.size:
        console.print(_parts_table(preset))
        console.print(f"\nvocabulary {preset.size.vocab_size:,}", style="dim")
    if preset.problem:
        console.print(f"Not counted: {preset.problem}", style="yellow", markup=False)
    _print_training(preset, host, console)


def _print_training(preset: Preset, host: PluginHost, console: Console) -> None:
    """The command that trains the preset; what it lacks is found where models can be built."""
    if preset.size is None:
        return
    from mt_cli.presets import training_command

    command, lacks = training_command(preset.name, host)
    console.print(command, markup=False, soft_wrap=True)
    for sentence in lacks:
        console.print(f"  but first: {sentence}", markup=False, soft_wrap=True)


def _values_table(preset: Preset) -> Table:
    from rich.text import Text

    from mt_core.config.files import shown

    table = _grid()
    for section, values in preset.values.items():
        for key, value in values.items():
            table.add_row(Text(f"  {section}.{key}"), Text(shown(value), style="cyan"))
    table.add_row()
    return table


def _parts_table(preset: Preset) -> Table:
    assert preset.size is not None
    table = _grid(numbers=True)
    for part, size in preset.size.parts.items():
        table.add_row(f"  {part}", f"{size:,}", f"{size / preset.size.total:.1%}")
    table.add_row("  parameters", f"{preset.size.total:,}", "", style="bold")
    return table


def _grid(*, numbers: bool = False) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for _ in range(2 if numbers else 1):
        table.add_column(justify="right" if numbers else "left")
    return table
