"""A progress bar for work that may take long; nothing is shown for the first second, nor without a terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SILENT_SECONDS = 1.0
log = logging.getLogger(__name__)


@contextmanager
def index_progress(title: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """Yields `update(done, total)`; without a terminal one line is logged when the work took long."""
    from rich.progress import Progress  # drawn rarely, and slow to import

    start = time.monotonic()
    bar = Progress(transient=True, disable=not sys.stderr.isatty())
    task = bar.add_task(title, total=total)

    def update(done: int, total: int) -> None:
        # Started late instead of at once: most indices are built in less than a second, and a bar would only flicker.
        if not bar.live.is_started and time.monotonic() - start > SILENT_SECONDS:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield update
    finally:
        bar.stop()
        if (seconds := time.monotonic() - start) > SILENT_SECONDS:
            log.info("%s: built in %.1f s", title, seconds)
