"""`mt data dedup`."""

from __future__ import annotations

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
    from mt_data.corpora.dedup_options import DedupOptions
    from mt_data.corpora.deduplication import dedup as run_dedup

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
