"""HTML of tables and of sections. Whatever comes from a run is escaped here."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any


@dataclass(frozen=True)
class Section:
    """A part of the page. body: HTML."""

    id: str
    title: str
    body: str


@dataclass(frozen=True)
class Html:
    """Text that is HTML already."""

    text: str


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], *, caption: str = "") -> str:
    """The first column heads its row. Cells are escaped unless they are Html."""
    head = "".join(f'<th scope="col">{escape(header)}</th>' for header in headers)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = "".join(_row(row) for row in rows)
    whole = f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{whole}</div>'


def _row(row: Sequence[Any]) -> str:
    first, *others = row
    cells = "".join(f"<td{_class(cell)}>{as_html(cell)}</td>" for cell in others)
    return f'<tr><th scope="row">{as_html(first)}</th>{cells}</tr>'


def _class(cell: Any) -> str:
    return ' class="number"' if isinstance(cell, (int, float)) and not isinstance(cell, bool) else ""


def as_html(value: Any) -> str:
    if isinstance(value, Html):
        return value.text
    return escape(shown(value))


def shown(value: Any) -> str:
    """A value as a reader expects it."""
    if value is None:
        return "\N{EN DASH}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)


def details(summary: str, body: str, *, is_open: bool = False) -> str:
    """body: HTML."""
    return f"<details{' open' if is_open else ''}><summary>{escape(summary)}</summary>{body}</details>"


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def finding(text: str) -> str:
    """A paragraph on what is wrong with a run."""
    return f'<p class="finding">{escape(text)}</p>'


def clock_time(seconds: float) -> Html:
    """A time of day that the page shows in the reader's time zone, and in UTC without its script."""
    utc = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    return Html(f'<time data-seconds="{seconds:.3f}">{utc}</time>')


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "\N{EN DASH}"
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def size(count: float | None) -> str:
    """Bytes in binary units."""
    if count is None:
        return "\N{EN DASH}"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
