"""Tables of numbers on the console."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

GIB = 2.0**30


def gib(size: float) -> str:
    """Bytes in GiB, with two decimals while they are significant."""
    amount = size / GIB
    return f"{amount:.2f}" if amount < 1000 else f"{amount:,.0f}"


def number_table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
