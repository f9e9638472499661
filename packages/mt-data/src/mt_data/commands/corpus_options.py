"""The options that all corpus commands share, and showing their progress and report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

Inputs = Annotated[list[str], typer.Argument(help="Files or quoted globs: .jsonl, .parquet, .txt, also .gz and .zst")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for the results, a file for each input")]
Dropped = Annotated[Path | None, typer.Option(help="Folder for what is left out, with the reason; not kept by default")]
Ending = Annotated[
    str | None, typer.Option(help=".jsonl, .jsonl.gz or .jsonl.zst; compressed as the inputs by default")
]
TextKey = Annotated[str, typer.Option(help="Key of the records that holds the text")]
InputFormat = Annotated[str, typer.Option(help="jsonl, text, text-lines or parquet, for names without a known ending")]
OnError = Annotated[str, typer.Option(help="raise: stop at a line that cannot be used; skip: count it and go on")]
Workers = Annotated[int, typer.Option(help="Processes; the result is the same for any number")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace results made with other options or inputs")]
ReportFile = Annotated[Path | None, typer.Option("--report", help="The report as JSON; OUTPUT/report.json by default")]


def run_options(
    output: Path,
    dropped: Path | None,
    ending: str | None,
    text_key: str,
    input_format: str,
    on_error: str,
    workers: int,
    overwrite: bool,
    report: Path | None,
    advance: Callable[[int, int], None],
) -> Any:
    """The options as the library takes them. Raises ConfigError for those that cannot be."""
    from mt_core.errors import ConfigError
    from mt_data.corpora.running import RunOptions
    from mt_data.corpora.streaming import Reading

    if on_error not in ("raise", "skip"):
        raise ConfigError(f"--on-error {on_error!r} is not known; give raise or skip")
    reading = Reading(text_key, input_format, "skip" if on_error == "skip" else "raise")
    return RunOptions(output, dropped, ending, reading, workers, overwrite, report, advance)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A line on the terminal with the documents and files done, and the rate; silent elsewhere."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}: {task.completed:,.0f} documents"),
        TextColumn("{task.fields[files]} files"),
    )
    with Progress(*columns, _rate_column(), TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        # No total: counting the documents of the inputs would mean reading them twice.
        task, files = bar.add_task(what, total=None, files=0), [0]

        def advance(documents: int, done: int) -> None:
            files[0] += done
            bar.update(task, advance=documents, files=files[0])

        yield advance


def _rate_column() -> Any:
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed:,.0f} documents/s" if task.speed else "")

    return Rate()


def show(report: Any) -> None:
    """Print a report's table."""
    from rich.console import Console

    Console().print(report.table())
