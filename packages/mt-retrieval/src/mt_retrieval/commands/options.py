"""Options that the commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from mt_core.paths import as_path
from mt_infer.commands.layout import progress_bar as bars

INDEX = Annotated[
    Path,
    typer.Argument(
        metavar="INDEX",
        help="A folder of mt retrieve index, of mt retrieve embed (searched exactly), or a .npy file of embeddings.",
    ),
]
CHECKPOINT = Annotated[
    Path | None,
    typer.Option(
        parser=as_path, help="The encoder. Default: where it was when the passages were embedded.", show_default=False
    ),
]
EVIDENCE = Annotated[
    str | None,
    typer.Option(help="The passages. Default: where they were when they were embedded.", show_default=False),
]
SEARCH_PARAMETERS = Annotated[
    str | None,
    typer.Option(help="Of an index of faiss, such as nprobe=64 or efSearch=128.", show_default=False),
]
DEVICE = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


@contextmanager
def progress_bar(title: str, *, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Yields `update(done, total)`, which draws a bar with the time left on standard error, if that is a terminal."""
    with bars(shown=shown, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
