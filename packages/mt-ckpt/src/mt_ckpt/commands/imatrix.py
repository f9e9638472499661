"""`mt imatrix`: an importance matrix for GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mt_core.paths import as_path
from mt_core.plugins import load_plugins


def imatrix(
    load_dir: Annotated[
        Path, typer.Option(parser=as_path, metavar="PATH", help="A checkpoint of any format, with a tokenizer.")
    ],
    text: Annotated[Path, typer.Option(metavar="FILE", help="A text in UTF-8 that the model is to compute.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The file to write, for mt convert --imatrix.")],
    chunk_size: Annotated[int, typer.Option(min=1, help="Tokens that are computed together.")] = 512,
    max_chunks: Annotated[int | None, typer.Option(min=1, help="Default: the whole text.")] = None,
) -> None:
    """Collect how large the inputs of each column of a model's matrices are, for quantization to GGUF."""
    from mt_ckpt.gguf.collect import collect_imatrix
    from mt_core.checkpoint_lookup import open_checkpoint

    host = load_plugins()
    sums = collect_imatrix(
        open_checkpoint(load_dir, host), text, output, host, chunk_size=chunk_size, max_chunks=max_chunks
    )
    unseen = {name: int((entry.counts == 0).sum()) for name, entry in sums.items() if (entry.counts == 0).any()}
    typer.echo(f"{output}: the importance of {len(sums)} matrices")
    for name, number in unseen.items():
        typer.echo(f"  {name}: {number} experts saw no token; their weights count alike")
