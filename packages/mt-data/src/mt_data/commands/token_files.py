"""`mt data inspect`, `verify` and `merge`: indexed datasets."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from mt_core.errors import DataError, MtError
from mt_core.wording import counted

if TYPE_CHECKING:
    from mt_data.indexed.inspection import Decode
    from mt_data.indexed.manifest import Manifest
    from mt_data.indexed.verification import VerifyReport


def inspect(
    prefix: Annotated[str, typer.Argument(help="The path or URL of the data set, without .bin or .idx.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    documents: Annotated[int, typer.Option(min=0, help="How many of the first documents to show.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens shown of each document.")] = 64,
    tokenizer_type: Annotated[
        str | None, typer.Option(help="Tokenizer to decode with. Default: the one the manifest records.")
    ] = None,
    vocab_file: Annotated[str | None, typer.Option(help="Where the tokenizer's vocabulary lies now.")] = None,
    merge_file: Annotated[str | None, typer.Option(help="Where its merges lie now.")] = None,
    tokenizer_model: Annotated[str | None, typer.Option(help="Where its model or directory lies now.")] = None,
    tokenizer: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Another key of the tokenizer's section. Repeatable."),
    ] = None,
) -> None:
    """Show counts, lengths and the first documents of an indexed dataset."""
    from mt_data.indexed.inspection import inspect_dataset
    from mt_data.tokenizers.recorded import tokenizer_entries

    notes: list[str] = []
    files = {"vocab_file": vocab_file, "merge_file": merge_file, "tokenizer_model": tokenizer_model}
    entries = {key: path for key, path in files.items() if path is not None} | tokenizer_entries(tokenizer or [])
    find = decoder_finder(tokenizer_type, entries, notes.append)
    inspection = inspect_dataset(prefix, documents=documents, max_tokens=max_tokens, find_decoder=find)
    if as_json:
        import json

        typer.echo(json.dumps(inspection.to_json() | {"notes": notes}, ensure_ascii=False))
        return
    from rich.console import Console

    from mt_data.commands.display import render_inspection

    console = Console(highlight=False)
    console.print(render_inspection(inspection))
    for note in notes:
        console.print(note, style="yellow", markup=False)


def decoder_finder(
    tokenizer_type: str | None, entries: Mapping[str, Any], note: Callable[[str], None]
) -> Callable[[Manifest | None], Decode | None]:
    """Where `inspect_dataset` gets its way from ids to text.

    A tokenizer that was requested must be there and be the data set's own, else ConfigError or DataError is raised.
    One that only the manifest names may be missing by now: `note` is called with the reason, and ids are shown.
    """

    from mt_data.tokenizers.recorded import recorded_tokenizer

    def find(manifest: Manifest | None) -> Decode | None:
        recorded = (manifest.tokenizer if manifest else None) or {}
        if tokenizer_type is None and not entries:
            return _recorded_decoder(recorded, note)
        return recorded_tokenizer(recorded, tokenizer_type, entries).decode

    return find


def _recorded_decoder(recorded: Mapping[str, Any], note: Callable[[str], None]) -> Decode | None:
    if "tokenizer_type" not in recorded:
        note("No tokenizer is recorded, so ids are shown; name one with --tokenizer-type and its files.")
        return None
    from mt_data.tokenizers.recorded import recorded_tokenizer

    try:
        return recorded_tokenizer(recorded).decode
    except MtError as error:
        note(f"Ids are shown, since the recorded tokenizer cannot be used: {error}")
        return None


# -- verify ------------------------------------------------------------------------------------------


def verify(
    prefix: Annotated[str, typer.Argument(help="The path or URL of the data set, without .bin or .idx.")],
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Ids must be below this. Default: the recorded tokenizer's.")
    ] = None,
) -> None:
    """Read all of an indexed dataset, and check its structure, its checksums and the range of its ids."""
    from mt_data.commands.display import byte_progress
    from mt_data.indexed import verification
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
        f"{report.prefix}: {counted(sizes.layout.num_documents, 'document')}, "
        f"{counted(sizes.layout.num_sequences, 'sequence')}, "
        f"{counted(sizes.num_tokens, 'token')} of {sizes.layout.dtype.name}",
        "structure: lengths, offsets and document boundaries agree with one another and with the sizes",
        "checksums: both files match the manifest"
        if report.manifest
        else "checksums: not compared, there is no manifest",
    ]
    ids = "there are none" if report.min_id is None else f"from {report.min_id} to {report.max_id}"
    if report.vocab_size is None:
        return [*lines, f"ids: {ids}; not compared, give --vocab-size"]
    return [*lines, f"ids: {ids}, all below vocab_size={report.vocab_size}"]


# -- merge -------------------------------------------------------------------------------------------


class MergeCommand(TyperCommand):
    """Lets `--input` take several values behind one option, as in `--input a b`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from mt_data.commands.preprocess import spread

        return super().parse_args(ctx, spread(args, ["--input"]))


def merge(
    input: Annotated[
        list[str], typer.Option(help="Prefixes, in order, or folders: all pairs in them, sorted by name.")
    ],
    output_prefix: Annotated[str, typer.Option(help="Prefix of the new data set.")],
    multimodal: Annotated[bool, typer.Option("--multimodal", help="The inputs have a mode for each sequence.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a data set of that name.")] = False,
) -> None:
    """Put indexed datasets one after another into a new one, keeping their documents."""
    from mt_data.commands.display import byte_progress
    from mt_data.indexed import merging
    from mt_data.indexed.layout import index_path
    from mt_data.preprocess.files import refuse_remote_output

    refuse_remote_output("--output-prefix", output_prefix)
    if os.path.exists(index_path(output_prefix)) and not overwrite:
        raise DataError(f"{index_path(output_prefix)} exists; choose another --output-prefix, or pass --overwrite")
    prefixes = merging.find_prefixes(input)
    parts = merging.check_parts(prefixes, output_prefix, multimodal)
    with byte_progress("merging", sum(part.sizes.data_bytes for part in parts)) as advance:
        manifest = merging.merge(prefixes, output_prefix, multimodal=multimodal, on_bytes=advance)
    typer.echo(
        f"{output_prefix}: {counted(manifest.documents, 'document')}, {counted(manifest.sequences, 'sequence')}, "
        f"{counted(manifest.tokens, 'token')} of {manifest.dtype}, from {counted(len(prefixes), 'data set')}"
    )
    if manifest.tokenizer is None:
        typer.echo("tokenizer: not recorded, since not all inputs record one")
    extras = [part.manifest.extra for part in parts if part.manifest]
    if dropped := sorted({key for extra in extras for key in extra} - manifest.extra.keys()):
        typer.echo(f"not recorded, since the inputs differ in it: {', '.join(dropped)}")
