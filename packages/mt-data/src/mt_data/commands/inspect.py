"""`mt data inspect`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mt_core.errors import MtError

if TYPE_CHECKING:
    from mt_data.indexed.inspection import Decode
    from mt_data.indexed.manifest import Manifest


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
    found = inspect_dataset(prefix, documents=documents, max_tokens=max_tokens, find_decoder=find)
    if as_json:
        import json

        typer.echo(json.dumps(found.to_json() | {"notes": notes}, ensure_ascii=False))
        return
    from rich.console import Console

    from mt_data.indexed.display import render_inspection

    console = Console(highlight=False)
    console.print(render_inspection(found))
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
