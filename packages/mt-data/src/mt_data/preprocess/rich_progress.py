"""Draws a run: a live bar on a terminal, a line every so often elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from mt_data.preprocess.options import Counts

LINE_SECONDS = 30.0


class RichProgress:
    """Shows MB/s and documents/s of this run (shards taken over from an earlier one do not count in rates)."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.total = Counts()
        self.shards = 0
        self._done_here = Counts()
        self._input_bytes = 0
        self._started = self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("tokenizing"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            _Summary(self),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> RichProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)

    def begin(self, total_bytes: int) -> None:
        self._input_bytes = total_bytes
        self._started = self._last_line = time.monotonic()
        self._bar.update(self._task, total=total_bytes)
        # Started only when the plan is made: drawing starts a thread of rich, and workers are forked before it.
        self._bar.start()

    def advance(self, counts: Counts, reused: bool) -> None:
        self.shards += 1
        self.total.add(counts)
        if not reused:
            self._done_here.add(counts)
        self._bar.update(self._task, completed=self.total.input_bytes)
        # Logs of batch jobs get a line every 30 s instead of a bar.
        if not self.console.is_terminal and time.monotonic() - self._last_line > LINE_SECONDS:
            self._last_line = time.monotonic()
            share = self.total.input_bytes / max(self._input_bytes, 1)
            self.note(f"{share:.0%}: {self.summary()}")

    def join(self, shards: int) -> None:
        self._bar.update(self._task, completed=self._input_bytes)
        self._bar.stop()
        self.note(f"{self.summary()}; joining {shards} shards")

    def _rates(self) -> tuple[float, float]:
        """(MB/s of input, documents/s)."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        return self._done_here.input_bytes / 1e6 / seconds, self._done_here.documents / seconds

    def short_summary(self) -> str:
        """Rates and tokens, for the width of a terminal."""
        rate, documents = self._rates()
        tokens = sum(self.total.tokens.values())
        return f"{rate:.1f} MB/s {short(documents)} docs/s {short(tokens)} tokens"

    def summary(self) -> str:
        """Totals and rates as one line."""
        rate, documents = self._rates()
        tokens = sum(self.total.tokens.values())
        skipped = f", {self.total.skipped:,} skipped" if self.total.skipped else ""
        return (
            f"{rate:.1f} MB/s, {documents:,.0f} docs/s, {self.total.documents:,} documents, {tokens:,} tokens{skipped}"
        )


class _Summary(ProgressColumn):
    def __init__(self, owner: RichProgress) -> None:
        super().__init__()
        self._owner = owner

    def render(self, task: Task) -> Text:
        return Text(self._owner.short_summary(), no_wrap=True)


def short(number: float) -> str:
    """A count in three or four characters: 950, 8.4k, 16.6M."""
    for unit in ("", "k", "M", "G"):
        if number < 1000:
            return f"{number:.0f}" if not unit else f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}T"
