"""`mt data filter-urls`."""

from __future__ import annotations

from pathlib import Path
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
    Workers,
    progress,
    run_options,
    show,
)

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
