"""`mt data clean`, `dedup`, `decontaminate` and `filter-urls`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mt_core.commands import with_fields
from mt_data.commands.corpus_options import Inputs, OutputOptions, ReadingOptions, TextKey, run_corpus_command
from mt_data.corpora.options import DedupOptions, OverlapOptions


def _listing(context: typer.Context, name: str, wanted: bool) -> bool:
    """Callback of --rules and --json, each of which runs before the arguments are required, in the order in which they
    were typed: the second one lists the rules."""
    context.meta[name] = wanted
    if context.meta.keys() >= {RULES, AS_JSON} and context.meta[RULES]:
        _show_rules(as_json=context.meta[AS_JSON])
        raise typer.Exit
    return wanted


def _show_rules(*, as_json: bool) -> None:
    from mt_data.corpora.clean_options import PRESETS, CleanOptions

    rules = {
        name: {"description": field.description, **{key: getattr(preset, name) for key, preset in PRESETS.items()}}
        for name, field in CleanOptions.model_fields.items()
    }
    if as_json:
        typer.echo(json.dumps(rules, indent=2))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("name", "what it does", *PRESETS, title="Rules of mt data clean, and what each preset sets")
    for name, rule in rules.items():
        values = (rule[key] for key in PRESETS)
        shown = ("" if value in (None, False, ()) else str(value) for value in values)
        table.add_row(name, Text(rule["description"] or ""), *shown)
    Console().print(table)


RULES, AS_JSON = "mt_data.commands.corpora.rules", "mt_data.commands.corpora.json"
Rules = Annotated[
    bool,
    typer.Option(
        "--rules",
        callback=lambda context, value: _listing(context, RULES, value),
        is_eager=True,
        help="List all rules and presets, then end",
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        callback=lambda context, value: _listing(context, AS_JSON, value),
        is_eager=True,
        help="Print the report, or the rules with --rules, as JSON",
    ),
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
    as_json: Json = False,
) -> None:
    """Repair texts, take bad lines out and drop documents that are too short, in other languages or of low quality."""
    from mt_data.corpora.clean_options import preset as preset_options
    from mt_data.corpora.cleaning import clean as run_clean

    options = preset_options(preset).replace(settings or [])
    run_corpus_command(
        "clean", outputs, reading, text_key, lambda run: run_clean(inputs, options, run), as_json=as_json
    )


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
