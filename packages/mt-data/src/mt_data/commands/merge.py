"""`mt data merge`."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from mt_core.errors import DataError


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
    from mt_data.indexed import merging
    from mt_data.indexed.display import byte_progress
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
        f"{output_prefix}: {manifest.documents:,} documents, {manifest.sequences:,} sequences, "
        f"{manifest.tokens:,} tokens of {manifest.dtype}, from {len(prefixes):,} data sets"
    )
    if manifest.tokenizer is None:
        typer.echo("tokenizer: not recorded, since not all inputs record one")
    extras = [part.manifest.extra for part in parts if part.manifest]
    if dropped := sorted({key for extra in extras for key in extra} - manifest.extra.keys()):
        typer.echo(f"not recorded, since the inputs differ in it: {', '.join(dropped)}")
