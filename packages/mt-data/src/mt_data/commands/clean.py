"""`mt data clean`."""

from __future__ import annotations

from typing import Annotated

import typer

from mt_data.commands.corpus_options import (
    Dropped,
    Ending,
    InputFormat,
    Inputs,
    OnError,
    Output,
    Overwrite,
    ReportFile,
    TextKey,
    Workers,
    progress,
    run_options,
    show,
)


def _show_rules(wanted: bool) -> None:
    if not wanted:
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from mt_data.corpora.clean_options import PRESETS, CleanOptions

    table = Table("name", "what it does", *PRESETS, title="Rules of mt data clean, and what each preset sets")
    for name, field in CleanOptions.model_fields.items():
        values = (getattr(options, name) for options in PRESETS.values())
        table.add_row(
            name, Text(field.description or ""), *("" if value in (None, False, ()) else str(value) for value in values)
        )
    Console().print(table)
    raise typer.Exit


Rules = Annotated[
    bool, typer.Option("--rules", callback=_show_rules, is_eager=True, help="List all rules and presets, then end")
]
Preset = Annotated[str, typer.Option(help="openwebtext, c4, gopher or none")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="name=value for one rule, may be repeated; none turns it off")
]


def clean(
    inputs: Inputs,
    output: Output,
    preset: Preset = "openwebtext",
    settings: Settings = None,
    dropped: Dropped = None,
    ending: Ending = None,
    text_key: TextKey = "text",
    input_format: InputFormat = "auto",
    on_error: OnError = "raise",
    workers: Workers = 1,
    overwrite: Overwrite = False,
    report: ReportFile = None,
    rules: Rules = False,
) -> None:
    """Repair texts, take bad lines out and drop documents that are too short, in other languages or of low quality."""
    from mt_data.corpora.clean_options import preset as preset_options
    from mt_data.corpora.cleaning import clean as run_clean

    options = preset_options(preset).replace(settings or [])
    with progress("clean") as advance:
        run = run_options(
            output, dropped, ending, text_key, input_format, on_error, workers, overwrite, report, advance
        )
        result = run_clean(inputs, options, run)
    show(result)
