"""`mt data inspect`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mt_core.errors import ConfigError, DataError, MtError

if TYPE_CHECKING:
    from mt_core.specs import Tokenizer
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

    notes: list[str] = []
    files = {"vocab_file": vocab_file, "merge_file": merge_file, "tokenizer_model": tokenizer_model}
    entries = {key: path for key, path in files.items() if path is not None} | _entries(tokenizer or [])
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

    A tokenizer that was asked for must be there and be the data set's own, else ConfigError or DataError is raised.
    One that only the manifest names may be missing by now: `note` is called with the reason, and ids are shown.
    """

    def find(manifest: Manifest | None) -> Decode | None:
        recorded = (manifest.tokenizer if manifest else None) or {}
        if tokenizer_type is None and not entries:
            return _recorded_decoder(recorded, note)
        built = build_tokenizer(recorded if tokenizer_type is None else {}, tokenizer_type, entries)
        _refuse_another(recorded, built)
        return built.decode

    return find


def _recorded_decoder(recorded: Mapping[str, Any], note: Callable[[str], None]) -> Decode | None:
    if "tokenizer_type" not in recorded:
        note("No tokenizer is recorded, so ids are shown; name one with --tokenizer-type and its files.")
        return None
    try:
        built = build_tokenizer(recorded, None, {})
        _refuse_another(recorded, built)
    except MtError as error:
        note(f"Ids are shown, since the recorded tokenizer cannot be used: {error}")
        return None
    return built.decode


def build_tokenizer(recorded: Mapping[str, Any], tokenizer_type: str | None, entries: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer `tokenizer_type`, or the recorded one, its configuration completed by `entries`.

    Raises ConfigError for keys or values that cannot be, PluginError for an unknown type.
    """
    from pydantic import ValidationError

    from mt_core.config.messages import validation_message
    from mt_core.plugins import load_plugins

    name = tokenizer_type or recorded.get("tokenizer_type")
    if name is None:
        raise ConfigError("the tokenizer's keys were given without --tokenizer-type, and the data set records none")
    spec = load_plugins().tokenizers.get(name, key="--tokenizer-type" if tokenizer_type else "tokenizer_type")
    config_type: Any = spec.config_type.load()
    given = {**recorded.get("config", {}), "tokenizer_type": name}
    origins = dict.fromkeys(given, "the manifest") | dict.fromkeys(entries, "the command line")
    try:
        config = config_type.model_validate({**given, **entries})
    except ValidationError as error:
        raise ConfigError(validation_message("tokenizer", config_type, error, origins)) from error
    return spec.build.load()(config)


def _refuse_another(recorded: Mapping[str, Any], built: Tokenizer) -> None:
    fingerprint = recorded.get("fingerprint")
    if fingerprint is not None and fingerprint != built.fingerprint():
        raise DataError(
            f"the data set was made with {recorded.get('tokenizer_type')} of fingerprint {fingerprint}, and this "
            f"tokenizer has {built.fingerprint()}; give the files it was made with"
        )


def _entries(texts: list[str]) -> dict[str, Any]:
    """Values of KEY=VALUE: a TOML value, else text."""
    import tomllib

    entries: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ConfigError(f"--tokenizer {text!r} must read KEY=VALUE, for example vocab_file=vocab.json")
        try:
            entries[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            entries[key] = value
    return entries
