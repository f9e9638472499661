"""Showing indexed datasets and the work on them on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from mt_data.indexed.inspection import DocumentPreview, Inspection
from mt_data.indexed.statistics import LengthStatistics

BAR_WIDTH = 40


@contextmanager
def byte_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over `total` bytes on standard error, if that is a terminal; yields what to call with each count done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def render_inspection(found: Inspection) -> RenderableType:
    """Facts, percentiles, histogram and first documents, one below the other."""
    parts: list[RenderableType] = [_facts(found)]
    if found.sequences:
        parts += ["", _percentiles(found.lengths), "", _histogram(found.lengths)]
    for preview in found.first_documents:
        parts += ["", *_document(preview)]
    return Group(*parts)


def _facts(found: Inspection) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in _fact_rows(found):
        table.add_row(name, Text(value))
    return table


def _fact_rows(found: Inspection) -> list[tuple[str, str]]:
    lengths = found.lengths
    rows = [
        ("prefix", found.prefix),
        (
            "documents",
            f"{found.documents:,}" + (f" ({found.empty_documents:,} empty)" if found.empty_documents else ""),
        ),
        ("sequences", f"{found.sequences:,}" + (f" ({lengths.empty:,} empty)" if lengths.empty else "")),
        ("tokens", f"{found.tokens:,}"),
        ("dtype", found.dtype + (", with modes (multimodal)" if found.multimodal else "")),
        ("size", f"{found.bin_bytes:,} bytes .bin, {found.idx_bytes:,} bytes .idx"),
    ]
    if found.manifest is None:
        return [*rows, ("manifest", "none; tokenizer and checksums are not known")]
    tokenizer = found.manifest.tokenizer or {}
    rows.append(("tokenizer", str(tokenizer.get("tokenizer_type", "not recorded"))))
    if found.manifest.vocab_size is not None:
        rows.append(("vocabulary", f"{found.manifest.vocab_size:,}"))
    return rows + [(key, str(value)) for key, value in found.manifest.extra.items()]


def _percentiles(lengths: LengthStatistics) -> Table:
    table = Table(title="tokens in a sequence", title_justify="left", title_style="", box=None)
    columns = {"shortest": f"{lengths.shortest:,}"}
    columns |= {f"{percent} %": f"{value:,}" for percent, value in lengths.percentiles.items()}
    columns |= {"longest": f"{lengths.longest:,}", "mean": f"{lengths.mean:,.1f}"}
    for name in columns:
        table.add_column(name, justify="right")
    table.add_row(*columns.values())
    return table


def _histogram(lengths: LengthStatistics) -> Table:
    table = Table(box=None)
    table.add_column("tokens", justify="right")
    table.add_column("sequences", justify="right")
    table.add_column("")
    highest = max(count for _, _, count in lengths.histogram)
    for first, last, count in lengths.histogram:
        label = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        table.add_row(label, f"{count:,}", Bar(highest, 0, count, width=BAR_WIDTH))
    return table


def _document(preview: DocumentPreview) -> Iterator[Text]:
    shown = "" if len(preview.ids) == preview.tokens else f", the first {len(preview.ids)}"
    yield Text(
        f"document {preview.number}: {preview.sequences:,} sequences, {preview.tokens:,} tokens{shown}", style="bold"
    )
    yield Text(" ".join(map(str, preview.ids)) if preview.text is None else printable(preview.text))


def printable(text: str) -> str:
    """`text` with control characters written as escapes, so that data cannot steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
