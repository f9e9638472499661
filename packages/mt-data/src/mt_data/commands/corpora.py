"""`mt data clean`, `dedup`, `decontaminate` and `filter-urls`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mt_core.commands import with_fields
from mt_data.commands.corpus_options import Inputs, OutputOptions, ReadingOptions, TextKey, run_corpus_command
from mt_data.corpora.options import DedupOptions, OverlapOptions


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


@with_fields
def clean(
    inputs: Inputs,
    outputs: OutputOptions,
    reading: ReadingOptions,
    preset: Preset = "openwebtext",
    settings: Settings = None,
    text_key: TextKey = "text",
    rules: Rules = False,
) -> None:
    """Repair texts, take bad lines out and drop documents that are too short, in other languages or of low quality."""
    from mt_data.corpora.clean_options import preset as preset_options
    from mt_data.corpora.cleaning import clean as run_clean

    options = preset_options(preset).replace(settings or [])
    run_corpus_command("clean", outputs, reading, text_key, lambda run: run_clean(inputs, options, run))


@with_fields
def dedup(
    inputs: Inputs, outputs: OutputOptions, reading: ReadingOptions, options: DedupOptions, text_key: TextKey = "text"
) -> None:
    """Keep the first of all documents that are equal, or nearly so."""
    from mt_data.corpora.deduplication import dedup as run_dedup

    run_corpus_command("dedup", outputs, reading, text_key, lambda run: run_dedup(inputs, options, run))


@with_fields
def decontaminate(
    inputs: Inputs,
    outputs: OutputOptions,
    evaluation: Annotated[list[str], typer.Option("--eval", help="Evaluation files or quoted globs; may be repeated")],
    eval_keys: Annotated[
        list[str], typer.Option(help="Key of the evaluation records that holds text to search for; may be repeated")
    ],
    reading: ReadingOptions,
    options: OverlapOptions,
    text_key: TextKey = "text",
) -> None:
    """Take out of training documents what evaluation sets contain."""
    from mt_data.corpora.decontamination import decontaminate as run_decontaminate

    run_corpus_command(
        "decontaminate",
        outputs,
        reading,
        text_key,
        lambda run: run_decontaminate(inputs, evaluation, eval_keys, options, run),
    )


@with_fields
def filter_urls(
    inputs: Inputs,
    outputs: OutputOptions,
    reading: ReadingOptions,
    domains: Annotated[list[Path] | None, typer.Option(help="File of domains, one a line; sub-domains go too")] = None,
    urls: Annotated[list[Path] | None, typer.Option(help="File of URLs of single pages, one a line")] = None,
    extensions: Annotated[list[Path] | None, typer.Option(help="File of extensions such as jpg, one a line")] = None,
    url_key: Annotated[
        str, typer.Option(help="Key of the records that holds the URL (.txt inputs are lists of URLs)")
    ] = "url",
) -> None:
    """Leave out URLs, or documents from URLs, that are malformed or on a blacklist. Each list may be repeated."""
    from mt_data.corpora.url_filter import UrlLists
    from mt_data.corpora.url_filter import filter_urls as run_filter_urls

    lists = UrlLists(tuple(domains or ()), tuple(urls or ()), tuple(extensions or ()))
    run_corpus_command(
        "filter-urls", outputs, reading, url_key, lambda run: run_filter_urls(inputs, lists, run, url_key)
    )
