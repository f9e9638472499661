"""`mt watch`: a run that is going, or has ended, from its files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mt_core.errors import ConfigError

if TYPE_CHECKING:
    from mt_ops.watch.watched_run import WatchedRun


def watch(
    run: Annotated[Path, typer.Argument(help="Run directory.", metavar="RUN", show_default=False)],
    web: Annotated[bool, typer.Option("--web", help="Serve the report's page, growing, to a browser here.")] = False,
    port: Annotated[int, typer.Option(help="With --web: its port. Default: a free one.", min=0, max=65535)] = 0,
    once: Annotated[bool, typer.Option("--once", help="Print the state and exit.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between looks at the files.", min=0.2)] = 2.0,
) -> None:
    """Show a run: curves, time left, what each rank does, the slowest one, data waits, checkpoints, memory, events.

    Reads the files of the run directory alone, so that it works on any machine that sees it, while the run goes on and
    after its end.
    """
    from mt_ops.watch.watched_run import WatchedRun

    watched = WatchedRun(run)
    if once:
        _print(watched)
    elif web:
        _serve(watched, port)
    else:
        _show(watched, interval)


def _print(watched: WatchedRun) -> None:
    from mt_ops.watch.watched_run import RANK_COLUMNS, event_lines, rank_rows, summary

    rows = [list(RANK_COLUMNS), *rank_rows(watched.run.status, time.time())]
    widths = [max(len(row[place]) for row in rows) for place in range(len(RANK_COLUMNS))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    typer.echo("\n".join([*summary(watched.run), "", *table, "", *event_lines(watched.run)]))


def _serve(watched: WatchedRun, port: int) -> None:
    from mt_ops.watch.web import WatchServer

    try:
        server = WatchServer(watched, port)
    except OSError as error:
        raise ConfigError(f"--port {port}: {error.strerror}; leave it out for a free one") from error
    used = server.server_address[1]
    typer.echo(f"{server.address}\nuntil Ctrl+C; from another machine: ssh -L {used}:127.0.0.1:{used} HOST")
    try:
        server.serve_forever()
    finally:
        server.server_close()


def _show(watched: WatchedRun, interval: float) -> None:
    try:
        from mt_ops.watch.terminal import WatchApp
    except ImportError as error:
        raise ConfigError(
            f"mt watch needs {error.name} (pip install 'mt-ops[watch]'); --once and --web do not"
        ) from None
    WatchApp(watched, interval).run()
