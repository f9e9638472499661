"""`mt data`."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help="Prepare, inspect, verify and filter data.")
