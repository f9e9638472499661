"""`Trainer`: builds a run from its configuration, resumes its checkpoint, and trains.

from mt_core.config import load_config
from mt_core.train import Trainer

trainer = Trainer(load_config(preset="gpt-tiny"), run_dir="runs/mine")
result = trainer.train()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mt_core.checkpoint_lookup import open_checkpoint, open_start
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config.loading import LoadedConfig
from mt_core.config.metrics import require_known_metric
from mt_core.config.schema import Config
from mt_core.data import building
from mt_core.data.loader import RankBatch
from mt_core.data.training_length import iterations_per_epoch, with_train_iters
from mt_core.errors import ConfigError
from mt_core.interfaces import Dataset
from mt_core.launch.phases import Phases
from mt_core.nn.loss import Loss, ReportsTraining
from mt_core.nn.model import required_inputs
from mt_core.parallel.context import ParallelContext, is_writer, wait_for_all
from mt_core.parallel.first_rank import on_first_rank
from mt_core.parallel.reductions import any_over
from mt_core.plugins import PluginHost, load_plugins
from mt_core.train.batch_source import configured_batch_source, restore_source, stored_state
from mt_core.train.callbacks import Callback, CallbackList, configured_callbacks
from mt_core.train.checkpoint.frozen_base import frozen_base
from mt_core.train.checkpoint.partial_load import PartialLoad, load_weights
from mt_core.train.checkpoint.resume import (
    change_table,
    data_identity,
    find_resume,
    require_same_data,
    require_same_run,
)
from mt_core.train.checkpoint.run_directory import BestCheckpoint, RunDirectory
from mt_core.train.checkpoint.saving import Committed, build_checkpoint_writer
from mt_core.train.checkpoint.state import LOSS_SCALER, RunState
from mt_core.train.engine import Engine, StepRecord
from mt_core.train.host_transfer import DelayedAllReduceFlag
from mt_core.train.recorded import RecordedMetrics, Reduce
from mt_core.train.reporting.event_log import StatusFile
from mt_core.train.reporting.run_summary import run_summary
from mt_core.train.reporting.step_metrics import StepMetrics
from mt_core.train.reporting.time_report import account_time, report_time, start_status, waited_for
from mt_core.train.reporting.warning_log import LoggedWarnings
from mt_core.train.run_control import RunControl, changes_to_store, stored_changes, with_stored_changes
from mt_core.train.same_start import require_same_checkpoint, require_same_samples, require_shared_folder
from mt_core.train.signals import StopSignals
from mt_core.train.state import TrainResult, TrainState
from mt_core.train.step.forward_backward import ForwardStep
from mt_core.train.step_checks import RecentLosses, StepChecks, expected_loss, is_comparable
from mt_core.train.time_parts import DEVICE_WAIT
from mt_core.train.validation import Evaluator, Validation, configured_evaluators


class Trainer:
    """A run: an `Engine`, its data sets, logging, callbacks, evaluation and checkpoints.

    Every component can be passed in instead of being built from the configuration.
    model: any module; one whose parameters were not made with `LayoutModule.declare` is whole on each rank.
    train_data, valid_data: data sets; of valid_data one, which is named "valid", or several by name.
    loss: (output, batch) -> losses [batch, sequence]. forward_step: (model, batch) -> losses, in place of both the call
    of the model and the loss. callbacks: added to the configured ones.
    run_dir: None writes nothing to disk. phases: notified of each phase of the run, for time limits over ranks.
    """

    def __init__(
        self,
        config: LoadedConfig,
        *,
        run_dir: str | Path | None = None,
        host: PluginHost | None = None,
        model: nn.Module | None = None,
        train_data: Dataset | None = None,
        valid_data: Mapping[str, Dataset] | Dataset | None = None,
        loss: Loss | None = None,
        forward_step: ForwardStep | None = None,
        callbacks: Sequence[Callback] = (),
        phases: Phases | None = None,
    ) -> None:
        self.host = host or load_plugins()
        self.phases = phases or Phases()
        self.directory = RunDirectory(run_dir, config.config.checkpoint.save) if run_dir is not None else None
        configured = configured_callbacks(config.config, self.host, is_first=is_writer())
        self.callbacks = CallbackList([*configured, *callbacks])
        self.evaluators = configured_evaluators(config.config, self.host)
        # The length of a caller's data set is known before the engine is built, which needs the number of steps for its
        # schedules.
        if train_data is not None and config.config.train.train_epochs is not None:
            config = replace(config, config=with_train_iters(config.config, len(train_data)))
        # Before the engine is built, which takes longest: a missing checkpoint is reported at once.
        self.resumed_from = find_resume(self.directory, config.config.checkpoint)
        self.changes = {} if self.resumed_from is None else stored_changes(self.resumed_from, self.host)
        """Values that were changed while the run trained: what they were, what they are, and by whom."""
        self.loaded = with_stored_changes(config, self.changes)
        with LoggedWarnings(self.warning):
            self._build(model, train_data, valid_data, loss, forward_step, counts_start=phases is not None)

    def _build(
        self,
        model: nn.Module | None,
        train_data: Dataset | None,
        valid_data: Mapping[str, Dataset] | Dataset | None,
        loss: Loss | None,
        forward_step: ForwardStep | None,
        *,
        counts_start: bool,
    ) -> None:
        """The engine, the state of a checkpoint, and the data. counts_start: the time since the process started is the
        run's."""
        config = self.loaded
        self.engine = Engine.build(config, host=self.host, model=model, loss=loss, forward_step=forward_step)
        self.time = self.engine.time
        # Of a program of its own: the phases are those of its rank session.
        if counts_start:
            self.time.count_start()
        self.checkpoint_writer = build_checkpoint_writer(self.config.checkpoint, self.host, self.directory, self.ctx)
        # Callbacks of other ranks than the first: those of all ranks, and what a program passes.
        records = not is_writer() and bool(self.callbacks.callbacks)
        # Losses are computed on the ranks of the last stage; a source may record on any rank.
        records |= isinstance(self.engine.loss, ReportsTraining) or self.config.train.batch_source != "dataset"
        self.recorded = RecordedMetrics(gathers=any_over(records, axis=self.ctx.world, device=self.engine.device))
        self.recent_losses = RecentLosses()
        self.checks = StepChecks(self.engine, self.recent_losses)
        self.loaded_weights: PartialLoad | None = None
        """What checkpoint.load (or load_parts) read and did not; None for a run that does not start from one."""
        self._last_saved = self._last_evaluated = -1
        self._last_measured: dict[Evaluator, int] = {}
        self._stop_reason: str | None = None
        self._is_out_of_time = False
        self._pending: StepRecord | None = None
        """With deferred metrics: the step whose metrics are read next."""
        self._stored_data: Mapping[str, str] = {}
        self._stored: Mapping[str, Any] = {}
        """Metadata of the checkpoint that the run resumes."""
        self.phases.enter("load")
        self._restore()
        self.phases.enter("data")
        self.time.enter("data")
        if train_data is None and forward_step is None:
            self._require_suitable_data()
        self.train_data = (
            building.in_epochs(train_data, self.config)
            if train_data is not None
            else building.build_train_data(self.config, self.engine.tokenizer, self.host)
        )
        self._data_identity = data_identity(self.train_data, self.engine.tokenizer)
        # After _restore(), which has read the identity of the stored data.
        self._check_data()
        self.valid_data: Mapping[str, Dataset] = (
            building.by_name(valid_data, "valid")
            if valid_data is not None
            else building.build_datasets(self.config, self.engine.tokenizer, "valid", self.host)
        )
        # Before a too short data set is an error of one node.
        require_same_samples(self._data_identity, self._configured_data(train_data, valid_data), self.config)
        # A data set that is too short is an error before the first step and not in the middle of a run.
        building.require_samples(self.train_data, self.engine.total_samples)
        self.source = configured_batch_source(self)
        if self.resumed_from is not None:
            restore_source(self.source, self._stored, str(self.resumed_from))
        self.validation = Validation(self.engine, self.valid_data)
        self.best = self._build_best()
        self.metrics = StepMetrics(self.engine)
        self.last_evaluation: dict[str, float] = {}
        self.time.enter("other")

    def _require_suitable_data(self) -> None:
        """Raises ConfigError where the configured data set lacks a field that the model cannot run without."""
        parameters = signature(self.model.forward).parameters
        # An input with a default (images of a model of texts and images) may be absent.
        needed = [
            name
            for name in required_inputs(self.model)
            if name in parameters and parameters[name].default is Parameter.empty
        ]
        if problem := building.unsuitable_data(needed, self.config, self.host):
            raise ConfigError(f"{problem}: set data.dataset_type to one of them, and its keys (mt config keys data)")

    @property
    def config(self) -> Config:
        """With model.vocab_size, train.loss and optimizer.main_weights resolved."""
        return self.engine.config

    @property
    def ctx(self) -> ParallelContext:
        return self.engine.ctx

    @property
    def model(self) -> nn.Module:
        return self.engine.model

    @property
    def state(self) -> TrainState:
        return self.engine.state

    def _configured_data(
        self, train_data: Dataset | None, valid_data: Mapping[str, Dataset] | Dataset | None
    ) -> dict[str, Dataset]:
        """The data sets by name that the configuration describes, without those that the caller gave."""
        train = {"train": self.train_data} if train_data is None else {}
        return {**train, **(self.valid_data if valid_data is None else {})}

    # -- the loop -------------------------------------------------------------------------------

    def train(self) -> TrainResult:
        """Train until the last step, a signal, or a callback's stop. The last step is always saved."""
        if self.directory is not None:
            # The directory exists before any rank writes into it.
            on_first_rank(partial(self._create, self.directory), self.ctx.world)
            require_shared_folder(self.directory.checkpoints, self.config)
        status: StatusFile | None = None
        try:
            repeatable = deterministic_algorithms(self.config.train.deterministic)
            with StopSignals() as signals, LoggedWarnings(self.warning), repeatable:
                for text in run_summary(self):
                    self.message(text)
                self.callbacks.on_train_start(self)
                status = start_status(self, self.phases)
                # A state that no checkpoint can keep is an error before the first step.
                self.callbacks.state_dict()
                # A callback may find that there is nothing to do: an early stop whose run is started again.
                if not any_over(self._stop_reason is not None, self.ctx.world, self.engine.device):
                    self._run_steps(signals)
            result = self._finish(interrupted=self._agree_on_stop(signals))
            report_time(self)
            self.callbacks.on_train_end(self, result)
            return result
        finally:
            if status is not None:
                status.stop()
            # Also after an error: a checkpoint that was in flight is completed and committed.
            for text in self.checkpoint_writer.close():
                self.message(text)
            self.source.close()
            self.callbacks.close()

    def _create(self, directory: RunDirectory) -> None:
        directory.create()
        directory.write_config(LoadedConfig(self.config, self.loaded.origins, self.loaded.preset))

    def stop(self, reason: str) -> None:
        """End training after the current step, with a checkpoint."""
        self._stop_reason = reason

    def message(self, text: str) -> None:
        """Show the user a message, by the callbacks that do."""
        self.callbacks.on_message(self, text)

    def warning(self, text: str) -> None:
        """Note a warning that Python's logging has shown, by the callbacks that keep what the terminal shows."""
        self.callbacks.on_warning(self, text)

    def record(self, name: str, value: float, reduce: Reduce = "mean") -> None:
        """A value for the next line of the log (`on_log`), reduced over the steps since the last line and over all
        ranks that record it: the mean of all values, their sum, the largest or the smallest.

        Raises TrainingError for an unknown reduction, or another one than the name had before.
        """
        self.recorded.add(name, value, reduce)

    def event(self, kind: str, **fields: Any) -> None:
        """Something that happened, with JSON values by name, for events.jsonl and other callbacks (`on_event`)."""
        self.callbacks.on_event(self, kind, fields)

    @cached_property
    def last_iteration(self) -> int:
        """The last step of training without an early stop."""
        return self.state.iteration + sum(1 for _ in self.engine.remaining_steps())

    def _run_steps(self, signals: StopSignals) -> None:
        self.model.train()
        self.metrics = StepMetrics(self.engine)
        batches = self.source.batches()
        any_rank, control = self._build_stop_flag(), RunControl(self)
        minutes, began = self.config.train.exit_duration_in_mins, time.monotonic()
        try:
            for rank_batch in waited_for(batches, self.time):
                self.take_step(rank_batch)
                if signals.received is not None:
                    self.stop(f"signal {signals.received.name}")
                # By the clock of each rank: the flag below stops all of them after the same step.
                if minutes is not None and time.monotonic() - began > 60.0 * minutes:
                    self.stop(f"train.exit_duration_in_mins={minutes:g}")
                    self._is_out_of_time = True
                # Saving then raises the error, on all ranks.
                if self.checkpoint_writer.has_failed:
                    self.stop("a checkpoint could not be written")
                # Without an all-reduce: every rank is at the same iteration.
                if self.state.iteration == self.config.train.exit_iteration:
                    self.stop(f"train.exit_iteration={self.state.iteration}")
                    return
                # A signal, a callback or a request may reach one rank only: the all-reduce tells all ranks after the
                # same step.
                if any_rank(self._stop_reason is not None or control.waits()):
                    control.carry_out()
                    if any_over(self._stop_reason is not None, self.ctx.world, self.engine.device):
                        return
        finally:
            batches.close()

    def _agree_on_stop(self, signals: StopSignals) -> bool:
        """Whether a signal to any rank, or the time of the job, ended training, so that another start continues it. All
        ranks then have a reason to stop, or none has one."""
        # Behind the last step a rank may have a reason that the delayed flag has not brought to the others, which would
        # evaluate without it.
        agree = partial(any_over, axis=self.ctx.world, device=self.engine.device)
        if not agree(self._stop_reason is not None):
            return False
        self._stop_reason = self._stop_reason or "another rank"
        return agree(signals.received is not None or self._is_out_of_time)

    def _build_stop_flag(self) -> Callable[[bool], bool]:
        """Whether a flag is set on any rank; delayed by one step if metrics are deferred."""
        if self.engine.step.deferred:
            return DelayedAllReduceFlag(self.ctx, self.ctx.world)
        return partial(any_over, axis=self.ctx.world, device=self.engine.device)

    def take_step(self, rank_batch: RankBatch) -> None:
        """One optimizer step on a batch, with metrics, callbacks, evaluation and saving."""
        self.phases.enter("step", step=self.state.iteration + 1)
        record = self.engine.launch_step(rank_batch)
        for note in record.notes:
            self.message(note)
        # The step before: its numbers have arrived while this one was launched. Its time ends where that of this one
        # starts.
        self._report_pending(ended=record.started)
        self._pending = record
        # A checkpoint must not be written, nor a model evaluated, before the step is known to be finite.
        if not self.engine.step.deferred or self._evaluates_or_saves():
            self._report_pending(ended=time.perf_counter())
        self._evaluate_and_save_if_due()

    def _report_pending(self, ended: float) -> None:
        """Check the pending step, if any, and pass its metrics to callbacks."""
        record, self._pending = self._pending, None
        if record is None:
            return
        with self.time(DEVICE_WAIT):
            outcome = record.pending.result()
        warning = self.checks.check(record, outcome, self.train_data)
        if warning is not None:
            self.message(warning)
        metrics = self.metrics.of_step(record, outcome, ended)
        self.callbacks.on_step_end(self, metrics)
        line = self.metrics.line_of_log(metrics, self.last_iteration)
        if line is not None:
            self._record_of_loss()
            self.callbacks.on_log(self, {**line, **self.recorded.take(self.ctx.world)})

    def _record_of_loss(self) -> None:
        loss: Any = self.engine.loss
        if isinstance(loss, ReportsTraining):
            for name, value, reduce in loss.take_recorded():
                self.record(name, value, reduce)

    def _is_due(self, interval: int | None) -> bool:
        """Whether what is done each `interval` steps, and at the end of each epoch, is done after this step."""
        intervals = (interval, iterations_per_epoch(self.config))
        return any(steps and self.state.iteration % steps == 0 for steps in intervals)

    def _evaluates_or_saves(self) -> bool:
        intervals = (self.config.train.eval_interval, self.config.checkpoint.save_interval)
        return any(self._is_due(interval) for interval in intervals) or bool(self._due_evaluators())

    def _evaluate_and_save_if_due(self) -> None:
        self._report_committed(self.checkpoint_writer.committed())
        with self.metrics.paused():
            if self._is_due(self.config.train.eval_interval):
                self._evaluate_and_keep_best()
            self.run_evaluators(self._due_evaluators())
            if self._is_due(self.config.checkpoint.save_interval) and self._last_saved != self.state.iteration:
                self.save()

    def _evaluate_and_keep_best(self) -> None:
        values = self.evaluate()
        self._last_evaluated = self.state.iteration
        if self.best is None or not self.best.improves(values):
            return
        if self._last_saved != self.state.iteration:
            self.save()
        # best.json may name a complete checkpoint only.
        self._report_committed(self.checkpoint_writer.finish())
        self.best.update(self.state.iteration, values[self.best.metric])
        self.message(f"best {self.best.metric} so far: {values[self.best.metric]:.4f} (step {self.state.iteration})")

    def _finish(self, *, interrupted: bool) -> TrainResult:
        self._report_pending(ended=time.perf_counter())
        if self._last_saved != self.state.iteration:
            self.save()
        # A stopped run is saved and not evaluated: it continues later, and may have seconds left to end.
        if self._stop_reason is None and self._last_evaluated != self.state.iteration:
            self._evaluate_and_keep_best()
        if self._stop_reason is None:
            self.run_evaluators(self.evaluators)
        self.phases.enter("save")
        with self.time("save"):
            self._report_committed(self.checkpoint_writer.finish())
            wait_for_all()
        losses = {name: value for name, value in self.last_evaluation.items() if name.endswith("_loss")}
        metrics = {name: value for name, value in self.last_evaluation.items() if name not in losses}
        return TrainResult(self.state, losses, self._reference_losses(), self._stop_reason, metrics, interrupted)

    # -- evaluation -------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics of each validation set, over train.eval_iters global batches or all samples."""
        self.phases.enter("evaluate")
        with self.time("evaluate"):
            self.last_evaluation = self.validation.evaluate()
        if self.last_evaluation:
            self.callbacks.on_evaluation(self, {"iteration": self.state.iteration, **self.last_evaluation})
        return self.last_evaluation

    def _build_best(self) -> BestCheckpoint | None:
        if self.config.checkpoint.best_metric is None:
            return None
        metric = self.validation.full_name(self.config.checkpoint.best_metric)
        require_known_metric(metric, self.validation.names())
        return BestCheckpoint(metric, self.directory, self.ctx, self.state.iteration) if self.directory else None

    def run_evaluators(self, evaluators: Iterable[Evaluator]) -> None:
        """Measure by those that have not measured the model of this step yet."""
        due = [evaluator for evaluator in evaluators if self._last_measured.get(evaluator) != self.state.iteration]
        if not due:
            return
        self.phases.enter("evaluate")
        with self.time("evaluate"):
            measured = {name: value for evaluator in due for name, value in evaluator.evaluate(self).items()}
        self._last_measured |= dict.fromkeys(due, self.state.iteration)
        self.callbacks.on_evaluation(self, {"iteration": self.state.iteration, **measured})

    def _due_evaluators(self) -> list[Evaluator]:
        default = self.config.train.eval_interval
        return [
            evaluator for evaluator in self.evaluators if self._is_due(getattr(evaluator, "interval", None) or default)
        ]

    def _reference_losses(self) -> dict[str, float]:
        """Losses of baseline models on the evaluated samples, from data sets that provide them."""
        measure = getattr(self.train_data, "reference_losses", None)
        valid = self.valid_data.get("valid")
        if measure is None or valid is None or self._stop_reason is not None:
            return {}
        return dict(measure(valid, range(self.engine.evaluated_samples(valid))))

    # -- requests of a user while the run trains (mt ctl), between two steps ----------------------

    def save_now(self) -> Path:
        """Raises ConfigError without a run directory."""
        self._report_pending(ended=time.perf_counter())
        with self.metrics.paused():
            if self._last_saved != self.state.iteration:
                self.save()
            self._report_committed(self.checkpoint_writer.finish())
        if self.directory is None:
            raise ConfigError("this run has no directory, and keeps no checkpoints; start it with --run-dir")
        return self.directory.checkpoint(self.state.iteration)

    def evaluate_now(self) -> Mapping[str, float]:
        self._report_pending(ended=time.perf_counter())
        with self.metrics.paused():
            if self._last_evaluated != self.state.iteration:
                self._evaluate_and_keep_best()
        return self.last_evaluation

    def change(self, config: Config, key: str, change: Mapping[str, Any]) -> None:
        """Go on with another value of a key; later checkpoints and their resumes have it."""
        self._report_pending(ended=time.perf_counter())
        # A key that is changed again is compared with the value of the run's start.
        first = self.changes.get(key, change)["before"]
        self.changes[key] = {**change, "before": first}
        self.engine.config = config
        self.loaded = replace(self.loaded, config=config, origins={**self.loaded.origins, key: change["origin"]})
        # With the number of steps, which a new exit_iteration may change.
        self.__dict__.pop("last_iteration", None)
        if self.directory is not None:
            on_first_rank(partial(self._create, self.directory), self.ctx.world)
        self.event("changed", key=key, **change)

    # -- checkpoints ------------------------------------------------------------------------------

    def save(self) -> Path | None:
        """Write a checkpoint of this step and point `latest` to it; None without a run directory.

        With checkpoint.async_save only the copy to host memory is done when this returns; `train` waits for the write.
        """
        if self.directory is None:
            return None
        self.phases.enter("save")
        with self.time("save"):
            began = time.perf_counter()
            path = self._write_checkpoint(self.directory)
            self.event("save", path=str(path), seconds=time.perf_counter() - began)
        account_time(self)
        return path

    def _write_checkpoint(self, directory: RunDirectory) -> Path:
        path = directory.checkpoint(self.state.iteration)
        contents = self.engine.contents(
            with_optimizer=self.config.checkpoint.save_optimizer,
            recent_losses=self.recent_losses.to_list(),
            data=self._data_identity,
            callbacks=self.callbacks.state_dict(),
            **changes_to_store(self.changes),
            **stored_state(self.source),
        )
        self.checkpoint_writer.write(path, contents if self.base is None else self.base.leave_out(contents))
        self._last_saved = self.state.iteration
        if self.config.checkpoint.async_save:
            self.message(f"requested {path.name}, which is written while training continues")
        self._report_committed(self.checkpoint_writer.committed())
        return path

    def _report_committed(self, checkpoints: Iterable[Committed]) -> None:
        for committed in checkpoints:
            if self.config.checkpoint.async_save:
                self.message(f"committed {committed.path.name}, written in {committed.seconds:.1f} s")
            self.callbacks.on_checkpoint(self, committed.path)
            if committed.removed:
                self.message(f"removed {', '.join(path.name for path in committed.removed)}")
            if committed.problem is not None:
                self.message(f"warning: {committed.problem}")

    def checkpointed(self) -> RunState:
        """The checkpointed state of this run."""
        return self.engine.checkpointed()

    def _restore(self) -> None:
        start = self.config.checkpoint.start
        if self.resumed_from is not None:
            reader: CheckpointReader | None = open_checkpoint(self.resumed_from, self.host)
        else:
            reader = open_start(start, self.host) if start is not None else None
        # Before restoring, which is collective: the run directory of one node may have a checkpoint, and another's not.
        run_dir = self.directory.path if self.directory is not None else None
        require_same_checkpoint(self.resumed_from, reader, self.config, run_dir)
        if self.resumed_from is not None and reader is not None:
            self._resume(self.resumed_from, reader)
        elif reader is not None:
            self.loaded_weights = load_weights(reader, self.checkpointed(), self.engine.layouts, self.config, self.host)
            self.engine.keep_files(reader)
        resumed = reader if self.resumed_from is not None else None
        self.base = frozen_base(self.config, self.engine.layouts, self.ctx, self.host, resumed)

    def _resume(self, path: Path, reader: CheckpointReader) -> None:
        changes = require_same_run(reader.metadata, self.config, str(path), self.host)
        if changes:
            self.message(f"accepted changes:\n{change_table(changes)}")
        self.checkpointed().restore(reader)
        if LOSS_SCALER not in reader.metadata and self.config.precision.dtype == "fp16":
            self.message(f"{path} has no loss scale, as those of other programs: it is found anew")
        self.engine.keep_files(reader)
        self._stored = reader.metadata
        losses = list(reader.metadata.get("recent_losses", []))  # absent in checkpoints from before this check
        self.recent_losses.replace(losses)
        self.checks.resumed_from = path
        # Keys outside of SAME_LOSS_SECTIONS may change the loss itself.
        self.checks.expected_loss = expected_loss(losses) if is_comparable(change.key for change in changes) else None
        self._last_saved = self.state.iteration
        self.callbacks.load_state_dict(reader.metadata.get("callbacks", {}))
        self._stored_data = reader.metadata.get("data", {})  # absent in checkpoints of older releases

    def _check_data(self) -> None:
        """Raises CheckpointError when the data differ from the checkpoint's and the change is not accepted."""
        origin = str(self.resumed_from)
        if changes := require_same_data(self._stored_data, self._data_identity, self.config, origin):
            self.message(f"accepted changes:\n{change_table(changes)}")
            self.checks.expected_loss = None


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Make torch raise an error for every operation that has no deterministic implementation."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
