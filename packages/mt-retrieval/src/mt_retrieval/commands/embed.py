"""`mt retrieve embed`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mt_core.commands import need
from mt_core.paths import as_path
from mt_infer.commands.layout import NPROC, SETTINGS, engine_settings, layout_of_ranks, start_ranks
from mt_retrieval.commands.options import DEVICE, progress_bar
from mt_retrieval.embeddings.options import BATCH_SIZE, SHARD_ROWS


def embed(
    context: typer.Context,
    checkpoint: Annotated[
        Path,
        typer.Argument(parser=as_path, metavar="CHECKPOINT", help="A run directory, or a checkpoint of any format."),
    ],
    evidence: Annotated[
        str,
        typer.Argument(
            metavar="EVIDENCE",
            help="A TSV file with the columns id, text and title, or the prefix of an indexed data set of sentences.",
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder of the embeddings. Killed, the same command continues there.")],
    seq_length: Annotated[
        int | None, typer.Option(min=8, help="Tokens of a passage. Default: those of training.", show_default=False)
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Passages of a forward pass.")] = BATCH_SIZE,
    shard_rows: Annotated[int, typer.Option(min=1, help="Passages of a file.")] = SHARD_ROWS,
    set_: SETTINGS = None,
    device: DEVICE = "auto",
    nproc: NPROC = None,
) -> None:
    """Embed passages: fp16 shards with a manifest, by any number of ranks."""
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt retrieve embed")
    start_ranks(context, nproc)
    from mt_core.launch.session import rank_session
    from mt_core.parallel.context import is_writer
    from mt_core.train.build import resolve_device
    from mt_retrieval.embeddings.writer import embed_evidence
    from mt_retrieval.encoder import Encoder
    from mt_retrieval.retriever import evidence_of

    settings = layout_of_ranks(engine_settings(set_ or []))
    with rank_session(resolve_device(device).type):
        encoder = Encoder.load(checkpoint, device=device, settings=settings, seq_length=seq_length)
        passages = evidence_of(evidence, encoder)
        with progress_bar("embedding", shown=is_writer()) as update:
            manifest = embed_evidence(
                encoder, passages, output, shard_rows=shard_rows, batch_size=batch_size, on_progress=update
            )
        if is_writer():
            typer.echo(
                f"{output}: {manifest.job.count:,} embeddings of width {manifest.dim} in {len(manifest.shards)} shards"
            )
