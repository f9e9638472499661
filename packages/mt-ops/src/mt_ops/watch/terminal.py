"""The live view in a terminal, by textual."""

from __future__ import annotations

import time
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Static

from mt_core.errors import DataError
from mt_ops.plot.curves import picture
from mt_ops.plot.terminal import draw
from mt_ops.watch.watched_run import RANK_COLUMNS, WatchedRun, event_lines, rank_rows, summary

METRICS = ("loss", "valid_loss", "grad_norm", "learning_rate", "tokens_per_second", "iteration_time", "mfu")


class WatchApp(App[None]):
    """Reads files each `interval` seconds and draws where something has changed."""

    CSS = """
    #summary { height: auto; padding: 0 1; }
    #curve { height: 18; padding: 0 1; }
    #ranks { height: auto; max-height: 14; }
    #events { height: auto; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("m", "next_metric", "other curve"),
        ("l", "log", "log scale"),
        ("q", "quit", "quit"),
    ]

    def __init__(self, watched: WatchedRun, interval: float) -> None:
        super().__init__()
        self.watched, self.interval = watched, interval
        self.metric, self.log_y = METRICS[0], False

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(id="summary")
            yield Static(id="curve")
            yield DataTable(id="ranks", cursor_type="none")
            yield Static(id="events")
        yield Footer()

    def on_mount(self) -> None:
        self.title = self.watched.run.name
        self.query_one(DataTable).add_columns(*RANK_COLUMNS)
        self.draw_all()
        self.set_interval(self.interval, self.look)

    def look(self) -> None:
        if self.watched.refresh():
            self.draw_all()
        else:
            self._summary()

    def on_resize(self) -> None:
        self._curve()

    def action_next_metric(self) -> None:
        present = [metric for metric in METRICS if metric in self.watched.run.series] or [METRICS[0]]
        place = present.index(self.metric) if self.metric in present else -1
        self.metric = present[(place + 1) % len(present)]
        self._curve()

    def action_log(self) -> None:
        self.log_y = not self.log_y
        self._curve()

    def draw_all(self) -> None:
        self._summary()
        self._curve()
        table = self.query_one(DataTable)
        table.clear()
        for row in rank_rows(self.watched.run.status, time.time()):
            table.add_row(*row)
        self.query_one("#events", Static).update(Text("\n".join(event_lines(self.watched.run))))

    def _summary(self) -> None:
        self.query_one("#summary", Static).update(Text("\n".join(summary(self.watched.run))))

    def _curve(self) -> None:
        place = self.query_one("#curve", Static)
        width = max(self.size.width - 4, 40)
        try:
            drawn = draw(picture([self.watched.run], self.metric, "step", 1, log_y=self.log_y), width, 17)
        except DataError:
            drawn = f"no {self.metric} yet"
        place.update(Text.from_ansi(drawn))
