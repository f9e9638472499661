"""`mt data verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mt_data.indexed.verification import VerifyReport


def verify(
    prefix: Annotated[str, typer.Argument(help="The path or URL of the data set, without .bin or .idx.")],
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Ids must be below this. Default: the recorded tokenizer's.")
    ] = None,
) -> None:
    """Read all of an indexed dataset, and check its structure, its checksums and the range of its ids."""
    from mt_data.indexed import verification
    from mt_data.indexed.display import byte_progress
    from mt_data.indexed.layout import data_path
    from mt_data.indexed.storage import size_of

    with byte_progress("verifying", size_of(data_path(prefix))) as advance:
        report = verification.verify(prefix, vocab_size, on_bytes=advance)
    report.raise_problems()
    typer.echo("\n".join(summary(report)))


def summary(report: VerifyReport) -> list[str]:
    """What was checked in a data set without problems, and what could not be; a line each."""
    sizes = report.sizes
    if sizes is None:
        raise ValueError("only a report without problems has a summary")
    lines = [
        f"{report.prefix}: {sizes.layout.num_documents:,} documents, {sizes.layout.num_sequences:,} sequences, "
        f"{sizes.num_tokens:,} tokens of {sizes.layout.dtype.name}",
        "structure: lengths, offsets and document boundaries agree with one another and with the sizes",
        "checksums: both files match the manifest"
        if report.manifest
        else "checksums: not compared, there is no manifest",
    ]
    found = "there are none" if report.min_id is None else f"from {report.min_id} to {report.max_id}"
    if report.vocab_size is None:
        return [*lines, f"ids: {found}; not compared, give --vocab-size"]
    return [*lines, f"ids: {found}, all below vocab_size={report.vocab_size}"]
