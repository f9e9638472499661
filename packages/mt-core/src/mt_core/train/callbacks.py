"""Observers of training. Methods do nothing unless overridden; all are called in the training process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from mt_core.config.loading import LoadedConfig
from mt_core.config.schema import Config
from mt_core.errors import MtError, PluginError
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.specs import CALLBACKS, CallbackSpec
from mt_core.train.checkpoint.partial_load import PartialLoad
from mt_core.train.checkpoint.run_directory import RunDirectory
from mt_core.train.engine import Engine
from mt_core.train.recorded import Reduce
from mt_core.train.state import TrainResult, TrainState

Metrics = Mapping[str, float | int | str]
"""Metrics of a step, by name: `loss`, `grad_norm`, `learning_rate` and what layers report."""


class ValidationSets(Protocol):
    def full_name(self, metric: str) -> str:
        """With the set that a metric alone stands for."""
        ...

    def names(self) -> Collection[str]:
        """What an evaluation gives."""
        ...


class Run(Protocol):
    """The part of the running `Trainer` that callbacks may use."""

    loaded: LoadedConfig
    """The configuration as it was given, with the origin of each value."""
    host: PluginHost
    engine: Engine
    directory: RunDirectory | None
    """None for a run that writes nothing to disk."""
    resumed_from: Path | None
    loaded_weights: PartialLoad | None
    """What checkpoint.load read and did not; None for a run that does not start from one."""

    @property
    def validation(self) -> ValidationSets:
        """The validation sets, with the names of what their evaluations give."""
        ...

    @property
    def config(self) -> Config: ...

    @property
    def ctx(self) -> ParallelContext: ...

    @property
    def model(self) -> nn.Module: ...

    @property
    def state(self) -> TrainState: ...

    @property
    def last_iteration(self) -> int: ...

    def stop(self, reason: str) -> None:
        """End training after the current step, with a checkpoint."""
        ...

    def message(self, text: str) -> None:
        """Show the user a message, by the callbacks that do."""
        ...

    def record(self, name: str, value: float, reduce: Reduce = "mean") -> None:
        """A value for the next line of the log, reduced over the steps since the last one and over ranks."""
        ...

    def event(self, kind: str, **fields: Any) -> None:
        """Something that happened, with JSON values by name, for events.jsonl and other callbacks (`on_event`)."""
        ...


class Callback:
    """Base of all callbacks. Those of the configuration run on rank 0, or on all ranks if their spec says so
    (`CallbackSpec.all_ranks`); those that a program passes run where it passes them."""

    def state_dict(self) -> dict[str, Any]:
        """JSON values that a checkpoint keeps, of rank 0."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """On all ranks that run it, before training starts: what `state_dict` had returned. Not called where the
        checkpoint has none."""

    def on_message(self, run: Run, text: str) -> None:
        """A message for the user: how `auto` was resolved, what was resumed, what was saved."""

    def on_warning(self, run: Run, text: str) -> None:
        """A warning of Python's logging, also of the time before training starts. The terminal has it already."""

    def on_train_start(self, run: Run) -> None:
        """Everything is built and restored; the first step follows."""

    def on_step_end(self, run: Run, metrics: Metrics) -> None:
        """After each optimizer step: iteration, consumed_samples, global_batch_size, loss, grad_norm, learning_rate,
        loss_scale, iteration_time (seconds), tokens_per_second or samples_per_second, and what layers add."""

    def on_log(self, run: Run, metrics: Metrics) -> None:
        """Every logging.log_interval steps: the same with loss and times averaged since the last time, without
        evaluations and saves; tflops (model TFLOP/s of a device) and mfu, where they are known."""

    def on_evaluation(self, run: Run, metrics: Metrics) -> None:
        """After an evaluation: iteration, `<set>_loss` for each validation set, and `<set>_<metric>` where the loss has
        metrics or reports some (`mt_core.nn.loss.ReportsEvaluation`), `overall_<metric>` of several sets together; or
        what evaluators measure."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """After a checkpoint is complete on the disk."""

    def on_event(self, run: Run, kind: str, fields: Mapping[str, Any]) -> None:
        """Something that happened, with JSON values by name: see mt_core.run_events."""

    def on_train_end(self, run: Run, result: TrainResult) -> None:
        """After the last step and checkpoint."""

    def close(self) -> None:
        """Always called last, also after an error: release files and the terminal."""


class CallbackList(Callback):
    """Calls several callbacks for each event, in order."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.callbacks = list(callbacks)

    def on_message(self, run: Run, text: str) -> None:
        self._each(lambda callback: callback.on_message(run, text))

    def on_warning(self, run: Run, text: str) -> None:
        self._each(lambda callback: callback.on_warning(run, text))

    def on_train_start(self, run: Run) -> None:
        self._each(lambda callback: callback.on_train_start(run))

    def on_step_end(self, run: Run, metrics: Metrics) -> None:
        self._each(lambda callback: callback.on_step_end(run, metrics))

    def on_log(self, run: Run, metrics: Metrics) -> None:
        self._each(lambda callback: callback.on_log(run, metrics))

    def on_evaluation(self, run: Run, metrics: Metrics) -> None:
        self._each(lambda callback: callback.on_evaluation(run, metrics))

    def on_checkpoint(self, run: Run, path: Path) -> None:
        self._each(lambda callback: callback.on_checkpoint(run, path))

    def on_event(self, run: Run, kind: str, fields: Mapping[str, Any]) -> None:
        self._each(lambda callback: callback.on_event(run, kind, fields))

    def on_train_end(self, run: Run, result: TrainResult) -> None:
        self._each(lambda callback: callback.on_train_end(run, result))

    def close(self) -> None:
        """All of them, although one may fail: a terminal that is gone keeps no file from being completed."""
        with ExitStack() as stack:
            for callback in reversed(self.callbacks):
                stack.callback(callback.close)

    def state_dict(self) -> dict[str, Any]:
        """By the name of the class, numbered where there are several; without callbacks that have no state.

        Raises PluginError for a state that does not come back from JSON as it is.
        """
        states = {name: state for name, callback in self._named() if (state := callback.state_dict())}
        for name, state in states.items():
            _require_json(name, state)
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, callback in self._named():
            if name in state:
                callback.load_state_dict(state[name])

    def _named(self) -> list[tuple[str, Callback]]:
        counts: Counter[str] = Counter()
        named = []
        for callback in self.callbacks:
            name = f"{type(callback).__module__}.{type(callback).__qualname__}"
            named.append((f"{name}.{counts[name]}", callback))
            counts[name] += 1
        return named

    def _each(self, call: Callable[[Callback], Any]) -> None:
        for callback in self.callbacks:
            call(callback)


def _require_json(name: str, state: Mapping[str, Any]) -> None:
    try:
        same = json.loads(json.dumps(state, allow_nan=False)) == state
    except (TypeError, ValueError) as error:
        raise PluginError(f"{name}.state_dict(): {error}; a checkpoint keeps JSON values") from error
    if not same:
        raise PluginError(
            f"{name}.state_dict() is not the same after JSON: {state!r}; it may hold lists and dictionaries with texts "
            "as keys, and no tuples"
        )


class GuardedTracker(CallbackList):
    """A tracker of logging.trackers. What fails as it starts is an error; what fails later is reported once."""

    def __init__(self, name: str, tracker: Callback) -> None:
        super().__init__([tracker])
        self.name = name
        self._run: Run | None = None
        self._reported = False

    def on_train_start(self, run: Run) -> None:
        try:
            super()._each(lambda tracker: tracker.on_train_start(run))
        except MtError:
            raise
        except Exception as error:
            raise PluginError(
                f"logging.trackers: {self.name} does not start: {error}; correct its settings, or take it out"
            ) from error
        self._run = run

    def _each(self, call: Callable[[Callback], Any]) -> None:
        # Before on_train_start has succeeded, errors are raised.
        if self._run is None:
            return super()._each(call)
        try:
            super()._each(call)
        except Exception as error:
            self._report(self._run, error)

    def _report(self, run: Run, error: Exception) -> None:
        if not self._reported:
            self._reported = True
            run.message(
                f"warning: the tracker {self.name} failed, and may lack points: {type(error).__name__}: {error}; "
                "training goes on, and further failures of it are not reported"
            )


def configured_callbacks(config: Config, host: PluginHost, *, is_first: bool) -> list[Callback]:
    """The callbacks that are always active, those named by train.callbacks, and the trackers. is_first: on rank 0; the
    others have those of all ranks."""
    named = config.train.callbacks
    always = [spec.name for spec in host[CALLBACKS] if spec.always and spec.name not in named]
    specs = [host[CALLBACKS].get(name) for name in always]
    specs += [host[CALLBACKS].get(name, key="train.callbacks") for name in named]
    if not is_first:
        return _built((spec for spec in specs if spec.all_ranks), config)
    trackers = [host[CALLBACKS].get(name, key="logging.trackers") for name in config.logging.trackers]
    guarded = [GuardedTracker(spec.name, spec.build.load()(config)) for spec in trackers]
    return [*_built(specs, config), *guarded]


def _built(specs: Iterable[CallbackSpec], config: Config) -> list[Callback]:
    """Without those that have nothing to do in this run."""
    built = [spec.build.load()(config) for spec in specs]
    return [callback for callback in built if callback is not None]
