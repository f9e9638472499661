"""`mt data decontaminate`."""

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

Evaluation = Annotated[list[str], typer.Option("--eval", help="Evaluation files or quoted globs; may be repeated")]
EvalKeys = Annotated[
    list[str], typer.Option(help="Key of the evaluation records that holds text to search for; may be repeated")
]
Ngram = Annotated[int, typer.Option(help="Words of the n-grams that may not be shared")]
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
    ngram: Ngram = 13,
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
    from mt_data.corpora.overlap_options import OverlapOptions

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
