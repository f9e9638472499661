"""What the console shows of training: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from mt_core.config.schema import Config
from mt_core.train.callbacks import Callback, Metrics, Run
from mt_core.train.reporting.log_lines import LogLines, log_lines, speed, stamped
from mt_core.train.state import TrainResult


class PlainProgress(Callback):
    """A line every logging.log_interval steps, for logs of batch jobs."""

    def __init__(self, console: Console, lines: LogLines) -> None:
        self.console, self._lines = console, lines
        self._last = 0

    def on_message(self, run: Run, text: str) -> None:
        self._print(text)

    def on_train_start(self, run: Run) -> None:
        self._last = run.last_iteration

    def on_log(self, run: Run, metrics: Metrics) -> None:
        self._print(self._lines.step(metrics, self._last))

    def on_evaluation(self, run: Run, metrics: Metrics) -> None:
        self._print(self._lines.evaluation(metrics))

    def on_checkpoint(self, run: Run, path: Path) -> None:
        self._print(stamped(f"saved {path}"))

    def on_train_end(self, run: Run, result: TrainResult) -> None:
        if result.stopped:
            self._print(f"stopped by {result.stopped} after step {result.state.iteration}")

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


BAR = 12
"""Characters of the narrowest bar that is worth showing."""


def live_columns(width: int, last_iteration: int) -> list[ProgressColumn]:
    """What fits on one line of `width` characters: the step, the loss and the time left always, then by importance
    the speed, the gradient norm, the learning rate and a bar."""
    steps = 2 * len(str(last_iteration)) + 1
    room = width - steps - len(" loss 00.000 00:00:00")
    shown: dict[str, ProgressColumn] = {}
    for name, cost, column in (
        ("rate", len(" 9,999,999 tokens/s"), TextColumn("{task.fields[rate]}")),
        ("grad_norm", len(" grad norm 999.99"), TextColumn("grad norm {task.fields[grad_norm]}")),
        ("learning_rate", len(" lr 1.0e-04"), TextColumn("lr {task.fields[learning_rate]}")),
        ("bar", 1 + BAR, BarColumn(bar_width=None)),
    ):
        # Stops at the first that does not fit, so that a less important column never takes the place of a more
        # important one.
        if cost > room:
            break
        room -= cost
        shown[name] = column
    order = ("bar", "steps", "loss", "grad_norm", "learning_rate", "rate", "left")
    shown["steps"] = MofNCompleteColumn()
    shown["loss"] = TextColumn("loss [bold]{task.fields[loss]}[/]")
    shown["left"] = TimeRemainingColumn(compact=True)
    return [shown[name] for name in order if name in shown]


class LiveProgress(PlainProgress):
    """One line that moves: step, loss, gradient norm, learning rate, speed, time left."""

    def __init__(self, console: Console, lines: LogLines) -> None:
        super().__init__(console, lines)
        self._progress = Progress(console=console)
        self._task = self._progress.add_task("", total=None, loss="-", grad_norm="-", learning_rate="-", rate="-")

    def on_train_start(self, run: Run) -> None:
        super().on_train_start(run)
        # Here and not in __init__: the number of the last step, and so the width of the counter, is known only now.
        self._progress.columns = tuple(live_columns(self.console.width, self._last))
        self._progress.update(self._task, total=self._last, completed=run.state.iteration)
        self._progress.start()

    def on_step_end(self, run: Run, metrics: Metrics) -> None:
        self._progress.update(
            self._task,
            completed=run.state.iteration,
            loss=f"{metrics['loss']:.3f}",
            grad_norm=f"{metrics['grad_norm']:.2f}",
            learning_rate=f"{metrics['learning_rate']:.1e}",
            rate=speed(metrics),
        )

    def on_log(self, run: Run, metrics: Metrics) -> None:
        """The live line says it all."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """Named at the end; in between it would only push the line down."""

    def close(self) -> None:
        self._progress.stop()


def build_progress(config: Config) -> Callback:
    """The display that logging.progress names; `auto` is live on a terminal, and plain elsewhere and for Megatron's
    lines."""
    console, lines = Console(), log_lines(config.logging)
    wanted = config.logging.progress
    if wanted == "none":
        return Callback()
    if wanted == "live" or (wanted == "auto" and console.is_terminal and config.logging.log_format == "mt"):
        return LiveProgress(console, lines)
    return PlainProgress(console, lines)
