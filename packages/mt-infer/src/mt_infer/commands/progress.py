"""The progress bar of commands."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn


def progress_bar(*more: ProgressColumn, shown: bool = True, transient: bool = False) -> Progress:
    """A line for each task, with what is done and the time left, on standard error, if that is a terminal.

    more: columns between the two. transient: lines are removed at the end.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *more, TimeRemainingColumn())
    return Progress(*columns, console=console, transient=transient, disable=not (shown and console.is_terminal))
