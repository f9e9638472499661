"""`mt data clean`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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

    from mt_data.corpora.options import PRESETS, CleanOptions

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
    from mt_data.corpora.cleaning import clean as run_clean
    from mt_data.corpora.options import preset as preset_options

    options = preset_options(preset).replace(settings or [])
    with progress("clean") as advance:
        run = run_options(
            output, dropped, ending, text_key, input_format, on_error, workers, overwrite, report, advance
        )
        result = run_clean(inputs, options, run)
    show(result)


# `mt data dedup`.

Method = Annotated[str, typer.Option(help="minhash: near duplicates; exact: equal texts")]
Normalize = Annotated[
    str, typer.Option(help="What exact overlooks: none, blanks, or words (blanks, case, punctuation)")
]
Threshold = Annotated[float, typer.Option(help="Jaccard similarity from which texts count as the same")]
NumPerm = Annotated[int, typer.Option(help="MinHash values a document; more are more exact and cost more")]
Ngram = Annotated[int, typer.Option(help="Length of the n-grams that are compared")]
Unit = Annotated[str, typer.Option(help="What the n-grams are of: word or char")]
Seed = Annotated[int, typer.Option(help="Of the MinHash permutations")]
Bands = Annotated[int | None, typer.Option(help="Bands of the LSH table; from the threshold by default")]
Rows = Annotated[int | None, typer.Option(help="Rows of a band; from the threshold by default")]
Verify = Annotated[bool, typer.Option(help="Compare candidates by their signatures before they count as the same")]
MemoryMb = Annotated[int, typer.Option(help="Memory for sorting, in MiB, besides 8 bytes a document")]


def dedup(
    inputs: Inputs,
    output: Output,
    method: Method = "minhash",
    normalize: Normalize = "blanks",
    threshold: Threshold = 0.8,
    num_perm: NumPerm = 128,
    ngram: Ngram = 5,
    unit: Unit = "word",
    seed: Seed = 1,
    bands: Bands = None,
    rows: Rows = None,
    verify: Verify = True,
    memory_mb: MemoryMb = 1024,
    dropped: Dropped = None,
    ending: Ending = None,
    text_key: TextKey = "text",
    input_format: InputFormat = "auto",
    on_error: OnError = "raise",
    workers: Workers = 1,
    overwrite: Overwrite = False,
    report: ReportFile = None,
) -> None:
    """Keep the first of all documents that are equal, or nearly so."""
    from mt_data.corpora.deduplication import dedup as run_dedup
    from mt_data.corpora.options import DedupOptions

    table: Any = {"method": method, "normalize": normalize, "unit": unit, "bands": bands, "rows": rows}
    options = DedupOptions(
        threshold=threshold,
        num_perm=num_perm,
        ngram=ngram,
        seed=seed,
        verify=verify,
        memory_bytes=memory_mb * 2**20,
        **table,
    )
    with progress("dedup") as advance:
        run = run_options(
            output, dropped, ending, text_key, input_format, on_error, workers, overwrite, report, advance
        )
        result = run_dedup(inputs, options, run)
    show(result)


# `mt data decontaminate`.

Evaluation = Annotated[list[str], typer.Option("--eval", help="Evaluation files or quoted globs; may be repeated")]
EvalKeys = Annotated[
    list[str], typer.Option(help="Key of the evaluation records that holds text to search for; may be repeated")
]
OverlapNgram = Annotated[int, typer.Option(help="Words of the n-grams that may not be shared")]
MinNgram = Annotated[int, typer.Option(help="Shorter evaluation texts of at least so many words count as one n-gram")]
MaxDocuments = Annotated[
    int, typer.Option(help="Ignore n-grams in more documents than this, as common phrases; 0 for no limit")
]
MinShare = Annotated[float, typer.Option(help="Act where shared n-grams cover at least this share of the words")]
Action = Annotated[str, typer.Option(help="split: cut shared n-grams out; drop: drop the document")]
Window = Annotated[int, typer.Option(help="Characters cut on either side of a shared n-gram")]
MinPiece = Annotated[int, typer.Option(help="Drop pieces with fewer characters")]
MaxPieces = Annotated[int, typer.Option(help="Drop documents cut into more pieces")]


def decontaminate(
    inputs: Inputs,
    output: Output,
    evaluation: Evaluation,
    eval_keys: EvalKeys,
    ngram: OverlapNgram = 13,
    min_ngram: MinNgram = 8,
    max_documents: MaxDocuments = 10,
    min_share: MinShare = 0.0,
    action: Action = "split",
    window: Window = 200,
    min_piece: MinPiece = 200,
    max_pieces: MaxPieces = 10,
    dropped: Dropped = None,
    ending: Ending = None,
    text_key: TextKey = "text",
    input_format: InputFormat = "auto",
    on_error: OnError = "raise",
    workers: Workers = 1,
    overwrite: Overwrite = False,
    report: ReportFile = None,
) -> None:
    """Take out of training documents what evaluation sets contain."""
    from mt_data.corpora.decontamination import decontaminate as run_decontaminate
    from mt_data.corpora.options import OverlapOptions

    act: Any = {"action": action}
    options = OverlapOptions(
        ngram=ngram,
        min_ngram=min_ngram,
        max_documents=max_documents or None,
        min_share=min_share,
        window=window,
        min_piece=min_piece,
        max_pieces=max_pieces,
        **act,
    )
    with progress("decontaminate") as advance:
        run = run_options(
            output, dropped, ending, text_key, input_format, on_error, workers, overwrite, report, advance
        )
        result = run_decontaminate(inputs, evaluation, eval_keys, options, run)
    show(result)


# `mt data filter-urls`.

Domains = Annotated[list[Path] | None, typer.Option(help="File of domains, one a line; sub-domains go too")]
Urls = Annotated[list[Path] | None, typer.Option(help="File of URLs of single pages, one a line")]
Extensions = Annotated[list[Path] | None, typer.Option(help="File of extensions such as jpg, one a line")]
UrlKey = Annotated[str, typer.Option(help="Key of the records that holds the URL (.txt inputs are lists of URLs)")]


def filter_urls(
    inputs: Inputs,
    output: Output,
    domains: Domains = None,
    urls: Urls = None,
    extensions: Extensions = None,
    url_key: UrlKey = "url",
    dropped: Dropped = None,
    ending: Ending = None,
    input_format: InputFormat = "auto",
    on_error: OnError = "raise",
    workers: Workers = 1,
    overwrite: Overwrite = False,
    report: ReportFile = None,
) -> None:
    """Leave out URLs, or documents from URLs, that are malformed or on a blacklist. Each list may be repeated."""
    from mt_data.corpora.url_filter import UrlLists
    from mt_data.corpora.url_filter import filter_urls as run_filter_urls

    lists = UrlLists(tuple(domains or ()), tuple(urls or ()), tuple(extensions or ()))
    with progress("filter-urls") as advance:
        run = run_options(output, dropped, ending, url_key, input_format, on_error, workers, overwrite, report, advance)
        result = run_filter_urls(inputs, lists, run, url_key)
    show(result)
