"""The options that all corpus commands share, and showing their progress and report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from mt_data.corpora.report import CorpusReport
    from mt_data.corpora.running import RunOptions
    from mt_data.corpora.streaming import Reading

Inputs = Annotated[list[str], typer.Argument(help="Files or quoted globs: .jsonl, .parquet, .txt, also .gz and .zst")]
TextKey = Annotated[str, typer.Option(help="Key of the records that holds the text")]


@dataclass(frozen=True)
class ReadingOptions:
    """How the inputs of all corpus commands are read."""

    input_format: Annotated[
        str, typer.Option(help="jsonl, text, text-lines or parquet, for names without a known ending")
    ] = "auto"
    on_error: Annotated[
        Literal["raise", "skip"],
        typer.Option(help="raise: stop at a line that cannot be used; skip: count it and go on"),
    ] = "raise"
    workers: Annotated[int, typer.Option(help="Processes; the result is the same for any number")] = 1

    def of_key(self, key: str) -> Reading:
        """Options of the library, for texts under `key`."""
        from mt_data.corpora.streaming import Reading

        return Reading(key, self.input_format, self.on_error)


@dataclass(frozen=True)
class OutputOptions:
    """What all corpus commands write."""

    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the results, a file for each input")]
    dropped: Annotated[
        Path | None, typer.Option(help="Folder for what is left out, with the reason; not kept by default")
    ] = None
    ending: Annotated[
        str | None, typer.Option(help=".jsonl, .jsonl.gz or .jsonl.zst; compressed as the inputs by default")
    ] = None
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace results made with other options or inputs")
    ] = False
    report: Annotated[
        Path | None, typer.Option("--report", help="The report as JSON; OUTPUT/report.json by default")
    ] = None


def run_corpus_command(
    what: str,
    outputs: OutputOptions,
    reading: ReadingOptions,
    key: str,
    work: Callable[[RunOptions], CorpusReport],
    *,
    as_json: bool = False,
) -> None:
    """Do the work with its progress shown, and print its report, as a table or as JSON.

    Raises ConfigError for options that cannot be.
    """
    from rich.console import Console

    from mt_data.corpora.running import RunOptions

    with progress(what) as advance:
        report = work(
            RunOptions(
                outputs.output,
                outputs.dropped,
                outputs.ending,
                reading.of_key(key),
                reading.workers,
                outputs.overwrite,
                outputs.report,
                advance,
            )
        )
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        Console().print(report.table())


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
