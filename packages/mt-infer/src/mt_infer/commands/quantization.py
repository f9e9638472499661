"""`mt quantization`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mt_core.commands import need
from mt_core.errors import DataError
from mt_core.paths import as_path
from mt_infer.commands.layout import SETTINGS, engine_settings


def quantization(
    path: Annotated[
        Path, typer.Argument(parser=as_path, metavar="PATH", help="A run directory, or a checkpoint of any format.")
    ],
    text: Annotated[Path, typer.Argument(parser=as_path, metavar="FILE", help="A text in UTF-8, read to its end.")],
    set_: SETTINGS = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Show what quantized weights and a quantized cache cost in perplexity, and what they save."""
    need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt quantization")
    from mt_infer.quantization.loss import measure

    settings = engine_settings(set_ or [])
    typer.echo(f"{'form':14} {'perplexity':>10} {'loss':>8} {'weights':>12} {'position':>10}  products")
    base = 0.0
    for found in measure(path, read_text(text), device, settings):
        base = base or found.perplexity
        loss = f"{found.perplexity / base - 1:+.2%}"
        weights, position = f"{found.weights / 2**20:.3f} MiB", f"{found.position} B"
        row = f"{found.name:14} {found.perplexity:10.4f} {loss:>8} {weights:>12} {position:>10}  {found.product}"
        typer.echo(row.rstrip())


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text: {error}") from error
