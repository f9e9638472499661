"""`mt retro verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from mt_retrieval.commands.options import DEVICE
from mt_retrieval.commands.retro.options import PROJECT, SAME_EMBEDDER, bars, ranks, say


def verify(
    context: typer.Context,
    project: PROJECT,
    fraction: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the blocks, drawn at random, that are computed again.")
    ] = 0.0,
    embedder: SAME_EMBEDDER = None,
    device: DEVICE = "auto",
) -> None:
    """Compare all files with their hashes and with each other, and blocks with what is computed now."""
    with ranks(context, "mt retro verify", device, None):
        from mt_retrieval.retro.verify import verify_project

        for line in verify_project(project, fraction=fraction, embedder=embedder, device=device, bars=bars):
            say(line)
