"""What the console shows of training: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mt_core.config.schema import Config
from mt_core.train.callbacks import Callback, Metrics
from mt_core.train.log_file import evaluation_line, step_line

if TYPE_CHECKING:
    from mt_core.train.trainer import Trainer, TrainResult


class PlainProgress(Callback):
    """A line every logging.log_interval steps, for logs of batch jobs."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._last = 0

    def on_message(self, run: Trainer, text: str) -> None:
        self._print(text)

    def on_train_start(self, run: Trainer) -> None:
        self._last = run.last_iteration

    def on_log(self, run: Trainer, metrics: Metrics) -> None:
        self._print(step_line(metrics, self._last))

    def on_evaluation(self, run: Trainer, metrics: Metrics) -> None:
        self._print(evaluation_line(metrics))

    def on_checkpoint(self, run: Trainer, path: Path) -> None:
        self._print(f"saved {path}")

    def on_train_end(self, run: Trainer, result: TrainResult) -> None:
        if result.stopped:
            self._print(f"stopped by {result.stopped} after step {result.state.iteration}")

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


class LiveProgress(PlainProgress):
    """One line that moves: step, loss, gradient norm, learning rate, tokens/s, time left."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss [bold]{task.fields[loss]}[/]"),
            TextColumn("grad norm {task.fields[grad_norm]}"),
            TextColumn("lr {task.fields[learning_rate]}"),
            TextColumn("{task.fields[rate]} tokens/s"),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self._task = self._progress.add_task("", total=None, loss="-", grad_norm="-", learning_rate="-", rate="-")

    def on_train_start(self, run: Trainer) -> None:
        super().on_train_start(run)
        self._progress.update(self._task, total=self._last, completed=run.state.iteration)
        self._progress.start()

    def on_step_end(self, run: Trainer, metrics: Metrics) -> None:
        self._progress.update(
            self._task,
            completed=run.state.iteration,
            loss=f"{metrics['loss']:.3f}",
            grad_norm=f"{metrics['grad_norm']:.2f}",
            learning_rate=f"{metrics['learning_rate']:.1e}",
            rate=f"{metrics['tokens_per_second']:,.0f}",
        )

    def on_log(self, run: Trainer, metrics: Metrics) -> None:
        """The live line says it all."""

    def on_checkpoint(self, run: Trainer, path: Path) -> None:
        """Named at the end; in between it would only push the line down."""

    def close(self) -> None:
        self._progress.stop()


def build_progress(config: Config) -> Callback:
    """By logging.progress; `auto` is live on a terminal and plain elsewhere."""
    console = Console()
    wanted = config.logging.progress
    if wanted == "none":
        return Callback()
    if wanted == "live" or (wanted == "auto" and console.is_terminal):
        return LiveProgress(console)
    return PlainProgress(console)
