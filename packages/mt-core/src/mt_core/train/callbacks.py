"""Observers of training. Methods do nothing unless overridden; all are called in the training process.

`run` is the Trainer: its `config`, `model`, `state`, `directory` may be read, `run.stop(reason)` ends
training after the step at hand, with a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mt_core.train.trainer import Trainer, TrainResult

Metrics = Mapping[str, float | int | str]


class Callback:
    """Base of all callbacks."""

    def on_message(self, run: Trainer, text: str) -> None:
        """Something to tell the user: what `auto` became, what was resumed, what was saved."""

    def on_train_start(self, run: Trainer) -> None:
        """Everything is built and restored; the first step follows."""

    def on_step_end(self, run: Trainer, metrics: Metrics) -> None:
        """After each optimizer step: iteration, loss, grad_norm, learning_rate, tokens_per_second, ..."""

    def on_log(self, run: Trainer, metrics: Metrics) -> None:
        """Every logging.log_interval steps, with the loss averaged since the last time."""

    def on_evaluation(self, run: Trainer, metrics: Metrics) -> None:
        """After an evaluation: iteration, and `<set>_loss` for each validation set."""

    def on_checkpoint(self, run: Trainer, path: Path) -> None:
        """After a checkpoint is complete on the disk."""

    def on_train_end(self, run: Trainer, result: TrainResult) -> None:
        """After the last step and checkpoint."""

    def close(self) -> None:
        """Always called last, also after an error: release files and the terminal."""


class CallbackList(Callback):
    """Passes each event to several callbacks, in order."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.callbacks = list(callbacks)

    def on_message(self, run: Trainer, text: str) -> None:
        self._each(lambda callback: callback.on_message(run, text))

    def on_train_start(self, run: Trainer) -> None:
        self._each(lambda callback: callback.on_train_start(run))

    def on_step_end(self, run: Trainer, metrics: Metrics) -> None:
        self._each(lambda callback: callback.on_step_end(run, metrics))

    def on_log(self, run: Trainer, metrics: Metrics) -> None:
        self._each(lambda callback: callback.on_log(run, metrics))

    def on_evaluation(self, run: Trainer, metrics: Metrics) -> None:
        self._each(lambda callback: callback.on_evaluation(run, metrics))

    def on_checkpoint(self, run: Trainer, path: Path) -> None:
        self._each(lambda callback: callback.on_checkpoint(run, path))

    def on_train_end(self, run: Trainer, result: TrainResult) -> None:
        self._each(lambda callback: callback.on_train_end(run, result))

    def close(self) -> None:
        self._each(lambda callback: callback.close())

    def _each(self, call: Callable[[Callback], Any]) -> None:
        for callback in self.callbacks:
            call(callback)
