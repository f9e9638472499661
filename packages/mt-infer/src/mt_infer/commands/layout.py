"""Options that the commands share: settings of the engine, the ranks that run it, and progress bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from mt_core.commands import typed_words
from mt_core.config.sources import parse_override

if TYPE_CHECKING:
    from mt_infer.text import TextGenerator


SETTINGS = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Settings of the engine (inference.*), its layout (parallel.*) and the like; repeatable.",
    ),
]
NPROC = Annotated[int | None, typer.Option(help="Processes to start on this machine, for a layout.", min=1)]
Settings = dict[str, dict[str, Any]]


def engine_settings(settings: Sequence[str]) -> Settings:
    """`section.key=value` -> section -> key -> value. Raises ConfigError for another form."""
    sections: Settings = {}
    for setting in settings:
        path, value = parse_override(setting)
        section: dict[str, Any] = sections
        for name in path[:-1]:
            section = section.setdefault(name, {})
        section[path[-1]] = value
    return sections


def on_ranks(
    context: typer.Context,
    path: Path,
    settings: Settings,
    device: str,
    nproc: int | None,
    use: Callable[[TextGenerator], None],
) -> None:
    """Loads the model and calls `use` on rank 0, while other ranks take part.

    nproc: starts so many processes, each of which runs this command again without --nproc; else the processes are those
    of torchrun or srun, or this one.
    """
    from mt_core.launch.session import rank_session
    from mt_core.parallel.context import is_writer
    from mt_core.train.build import resolve_device
    from mt_infer.text import TextGenerator

    # Does not return with --nproc.
    start_ranks(context, nproc)
    settings = layout_of_ranks(settings)
    with rank_session(resolve_device(device).type):
        generator = TextGenerator.load(path, device=device, settings=settings)
        # Ranks other than 0 take part in the collectives of every step until rank 0 closes.
        if not is_writer():
            return generator.follow()
        try:
            use(generator)
        finally:
            generator.close()


def start_ranks(context: typer.Context, nproc: int | None) -> None:
    """Ends this process as the launcher of `nproc` ranks, if that is given."""
    if nproc is not None:
        from mt_core.launch.local import launch

        raise typer.Exit(launch(nproc, _without_nproc(typed_words(context))))


def layout_of_ranks(settings: Settings) -> Settings:
    """With a layout (that of all ranks as replicas, if none is set) where there are several."""
    from mt_core.launch.environment import read_environment

    return {"parallel": {}, **settings} if read_environment().world_size > 1 else settings


def _without_nproc(arguments: Sequence[str]) -> list[str]:
    kept, skipped = [], False
    for argument in arguments:
        if skipped or argument == "--nproc" or argument.startswith("--nproc="):
            skipped = argument == "--nproc"
            continue
        kept.append(argument)
    return kept


def progress_bar(*more: ProgressColumn, shown: bool = True, transient: bool = False) -> Progress:
    """A line for each task, with what is done and the time left, on standard error, if that is a terminal.

    more: columns between the two. transient: lines are removed at the end.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *more, TimeRemainingColumn())
    return Progress(*columns, console=console, transient=transient, disable=not (shown and console.is_terminal))
