"""`Trainer`: builds a run from its configuration, takes up its checkpoint, and trains.

from mt_core.config import load_config
from mt_core.train import Trainer

trainer = Trainer(load_config(preset="gpt-tiny"), run_dir="runs/mine")
result = trainer.train()
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import nn

from mt_core.config.loading import LoadedConfig
from mt_core.data import building
from mt_core.data.batch_size import build_batch_size, total_train_samples
from mt_core.data.loader import BatchReader, RankBatch
from mt_core.errors import CheckpointError, ConfigError, DataError, TrainingError
from mt_core.launch.phases import Phases
from mt_core.nn.auxiliary import ReportsMetrics
from mt_core.nn.dropout import SAMPLE, DropoutStreams, use_streams
from mt_core.nn.kernels.use import configured_kernels, use_kernels
from mt_core.nn.layout import parameter_layouts, stream_seed
from mt_core.nn.loss import Loss
from mt_core.optim.environment import OptimizerEnvironment
from mt_core.optim.gradients import GradientSums
from mt_core.optim.loss_scale import build_loss_scaler
from mt_core.parallel.context import is_writer, wait_for_all
from mt_core.parallel.data import any_over
from mt_core.parallel.pipeline.trace import ScheduleRecorder, write_trace
from mt_core.parallel.shared_batches import broadcast_batches
from mt_core.parallel.stage_copies import find_stage_copies
from mt_core.plugins import PluginHost, load_plugins
from mt_core.specs import Dataset
from mt_core.train import build
from mt_core.train.announcement import announcement
from mt_core.train.callbacks import Callback, CallbackList
from mt_core.train.checkpointing import (
    Checkpointed,
    merged_over_stages,
    open_checkpoint,
    shapes_of_all_stages,
)
from mt_core.train.cuda_graphs.rules import graph_blocks
from mt_core.train.device_batches import FIRST_SAMPLE, DeviceBatches
from mt_core.train.evaluation import evaluate
from mt_core.train.faults import first_fault
from mt_core.train.late_step import AgreedLate, LateStep, PendingOutcome, TakenStep, counted_tokens, tells_late
from mt_core.train.loss_check import ExpectedLoss, RecentLosses, expected_loss, is_comparable
from mt_core.train.partial_load import fresh_parameters
from mt_core.train.random_streams import dropout_stream
from mt_core.train.resume import change_table, require_same_run
from mt_core.train.run_directory import RunDirectory, find_checkpoint
from mt_core.train.saving import Committed, Contents, build_checkpoint_writer
from mt_core.train.signals import StopSignals
from mt_core.train.stages import ThroughStages, build_stages, require_pipelined
from mt_core.train.state import TrainState
from mt_core.train.step import (
    Batch,
    ForwardStep,
    MicroBatches,
    OneByOne,
    OptimizerStep,
    StepOutcome,
    default_forward_step,
)
from mt_core.verify.replicas import check_replicas

TRACED_STEP = 2
"""Of this process's steps: the first one also warms up."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. losses: the last evaluation, by validation set. stopped: why early, else None."""

    state: TrainState
    losses: Mapping[str, float]
    reference_losses: Mapping[str, float]
    stopped: str | None


@dataclass
class LogWindow:
    """What happened since the last line of the log."""

    loss: float = 0.0
    steps: int = 0
    tokens: float = 0.0
    started: float = field(default_factory=time.perf_counter)


class Trainer:
    """A run. Every part can be given instead of being built from the configuration.

    model: a module whose parameters were made with `LayoutModule.declare`. train_data, valid_data: data
    sets (valid by name). loss: (output, batch) -> losses [batch, sequence]. forward_step: (model, batch) ->
    losses, in place of both the call of the model and the loss. callbacks: added to the configured ones.
    run_dir: None writes nothing to disk. phases: told what is being done, for time limits over ranks.
    """

    def __init__(
        self,
        config: LoadedConfig,
        *,
        run_dir: str | Path | None = None,
        host: PluginHost | None = None,
        model: nn.Module | None = None,
        train_data: Dataset | None = None,
        valid_data: Mapping[str, Dataset] | None = None,
        loss: Loss | None = None,
        forward_step: ForwardStep | None = None,
        callbacks: Sequence[Callback] = (),
        phases: Phases | None = None,
    ) -> None:
        self.host = host or load_plugins()
        self.phases = phases or Phases()
        self.loaded = config
        self.directory = RunDirectory(run_dir, config.config.checkpoint.save) if run_dir is not None else None
        self.state = TrainState()
        # What configuration asks for speaks to the console and to files: one process does that for all.
        self.callbacks = CallbackList([*(self._configured_callbacks() if is_writer() else []), *callbacks])
        self._stop_reason: str | None = None
        self.not_loaded: list[str] = []
        """Parameters that checkpoint.load left as they were made."""
        self.recent_losses = RecentLosses()
        self._expected_loss: ExpectedLoss | None = None
        self.resumed_from = self._find_resume()

        train = config.config.train
        if train.num_threads is not None:
            torch.set_num_threads(train.num_threads)
        self.device = build.resolve_device(train.device)
        self.tokenizer = building.build_tokenizer(config.config, self.host)
        self.config = build.with_vocab_size(config.config, self.tokenizer)
        self.ctx = build.build_context(self.config, self.device)
        self.checkpoint_writer = build_checkpoint_writer(self.config.checkpoint, self.host, self.directory, self.ctx)
        self.stages = build_stages(self.config, self.ctx)
        self.kernels = configured_kernels(self.config, self.ctx)
        self.model = model if model is not None else self._build_model()
        build.compile_blocks(self.model, self.config)
        self.copies = find_stage_copies([name for name, _ in self.model.named_parameters()], self.ctx)
        self.weights = build.build_weights(self.config, self.model, self.ctx, self.copies)
        layouts = parameter_layouts(self.model)
        environment = OptimizerEnvironment(self.model, self.weights, layouts, self.ctx, self.kernels)
        self.optimizer = build.build_optimizer(self.config, environment, self.host)
        self.schedule = build.build_schedule(self.config, self.host)
        self.group_schedules = build.build_group_schedules(self.config, self.host)
        self.batch_size = build_batch_size(self.config)
        self.device_batches = DeviceBatches(self.device, self.ctx.cp)
        self.total_samples = total_train_samples(self.config)
        self.recorder: ScheduleRecorder | None = None
        use_streams(self.model, DropoutStreams(train.seed))
        own_stages = self.stages.own if self.stages is not None else None
        self.graphs = graph_blocks(self.model, self.config, self.ctx, own_stages)
        loss = loss or self._configured_loss()
        build.require_options(self.model, loss, self.config)
        self.micro_batches = self._build_micro_batches(loss, forward_step)
        self.kernels.require_used(merged_over_stages(dict.fromkeys(self.kernels.picked, True), self.ctx))
        self.scaler = build_loss_scaler(self.config.precision)
        self.step = OptimizerStep(
            self.model,
            self.weights,
            self.optimizer,
            self.micro_batches,
            self.scaler,
            self.config.optimizer.clip_grad,
            GradientSums(layouts, self.ctx, self.copies, divided=build.divides_state(self.config)),
            count_zeros=self.config.logging.log_num_zeros_in_grad,
        )
        self.late_step = self._build_late_step()
        self._untold: TakenStep | None = None
        torch.manual_seed(stream_seed(train.seed, dropout_stream(self.ctx)))
        self.phases.enter("load")
        self._restore()
        self.phases.enter("data")
        self.train_data = train_data if train_data is not None else self._build_train_data()
        self.valid_data = valid_data if valid_data is not None else self._build_datasets("valid")
        building.require_samples(self.train_data, self.total_samples)
        self.last_losses: dict[str, float] = {}
        self._steps_taken = 0

    def _build_model(self) -> nn.Module:
        own = self.stages.own if self.stages is not None else None
        return build.build_initialized_model(self.config, self.ctx, self.host, own, self.kernels)

    def _build_late_step(self) -> LateStep | None:
        if not tells_late(self.config, self.ctx, self.optimizer):
            return None
        clip_grad, sums = self.config.optimizer.clip_grad, self.step.sums
        return LateStep(self.model, self.weights, self.optimizer, self.micro_batches, clip_grad, sums)

    def _build_agreement(self) -> Callable[[bool], bool]:
        """Whether a flag is set on any rank; of the step before, where the host does not wait for the step at hand."""
        if self.late_step is not None:
            return AgreedLate(self.ctx, self.ctx.world)
        return partial(any_over, axis=self.ctx.world, device=self.device)

    def _build_micro_batches(self, loss: Loss, forward_step: ForwardStep | None) -> MicroBatches:
        if self.stages is None:
            return OneByOne(self.model, forward_step or default_forward_step(loss), self.weights, self._begin)
        require_pipelined(self.model, self.config)
        if forward_step is not None:
            raise ConfigError(
                f"parallel.pipeline_model_parallel_size={self.ctx.pp.size}: a forward_step of one's own runs the whole "
                "model at once, which no process has; give a loss instead"
            )
        if self.config.logging.trace_schedule is not None:
            self.recorder = ScheduleRecorder(self.device)
        return ThroughStages(self.model, self.stages, loss, self.ctx, self.recorder, self._begin)

    def _begin(self, batch: Batch) -> None:
        """What a micro-batch drops follows from the number of its first sample."""
        SAMPLE.set(int(batch[FIRST_SAMPLE]))

    # -- the loop -------------------------------------------------------------------------------

    def train(self) -> TrainResult:
        """Train to the end, or until a signal or a callback stops it; the last step is always saved."""
        if self.directory is not None and self.ctx.is_writer:
            self.directory.create()
            self.directory.write_config(LoadedConfig(self.config, self.loaded.origins, self.loaded.preset))
        wait_for_all()
        try:
            with StopSignals() as signals, deterministic_algorithms(self.config.train.deterministic):
                for text in announcement(self):
                    self.callbacks.on_message(self, text)
                self.callbacks.on_train_start(self)
                self._run_steps(signals)
            result = self._finish()
            self.callbacks.on_train_end(self, result)
            return result
        finally:
            for text in self.checkpoint_writer.close():
                self.callbacks.on_message(self, text)
            self.callbacks.close()

    def stop(self, reason: str) -> None:
        """End training after the step at hand, with a checkpoint."""
        self._stop_reason = reason

    def evaluate(self) -> dict[str, float]:
        """Loss on each validation set, over train.eval_iters global batches."""
        self.phases.enter("evaluate")
        self.weights.finish_gather()
        losses = {}
        for name, dataset in self.valid_data.items():
            size = self.batch_size.full
            count = self._evaluated_samples(dataset)
            steps = [(first, min(size, count - first)) for first in range(0, count, size)]
            ahead = self.device_batches.ahead(self._batches(dataset, steps))
            batches = (self.device_batches.take(rank_batch) for rank_batch in ahead)
            losses[f"{name}_loss"] = evaluate(self.model, batches, self.micro_batches, self.ctx)
        self.last_losses = losses
        if losses:
            self.callbacks.on_evaluation(self, {"iteration": self.state.iteration, **losses})
        return losses

    def save(self) -> Path | None:
        """Write a checkpoint of this step and point `latest` to it; None without a run directory.

        With checkpoint.async_save it is copied when this returns; `train` waits for the disk before it ends.
        """
        if self.directory is None:
            return None
        self.phases.enter("save")
        path = self.directory.checkpoint(self.state.iteration)
        state = self.checkpointed()
        metadata = {**state.metadata(self.config), "recent_losses": self.recent_losses.to_list()}
        contents = Contents(state.fragments(), metadata, dict(self.tokenizer.files()))
        self.checkpoint_writer.write(path, contents)
        wait_for_all()
        self._last_saved = self.state.iteration
        if self.config.checkpoint.async_save:
            self.callbacks.on_message(self, f"requested {path.name}, which is written while training goes on")
        self._tell_committed(self.checkpoint_writer.committed())
        return path

    def _tell_committed(self, checkpoints: Iterable[Committed]) -> None:
        for committed in checkpoints:
            if self.config.checkpoint.async_save:
                self.callbacks.on_message(
                    self, f"committed {committed.path.name}, written in {committed.seconds:.1f} s"
                )
            self.callbacks.on_checkpoint(self, committed.path)
            if committed.removed:
                self.callbacks.on_message(self, f"removed {', '.join(path.name for path in committed.removed)}")
            if committed.problem is not None:
                self.callbacks.on_message(self, f"warning: {committed.problem}")

    @cached_property
    def last_iteration(self) -> int:
        """The step that ends training, if nothing stops it before."""
        rest = self.batch_size.steps(self.state.consumed_samples, self.total_samples)
        return self.state.iteration + sum(1 for _ in rest)

    # -- steps ----------------------------------------------------------------------------------

    def _run_steps(self, signals: StopSignals) -> None:
        self.model.train()
        steps = self.batch_size.steps(self.state.consumed_samples, self.total_samples)
        batches = self._batches(self.train_data, steps)
        window = LogWindow()
        agreed = self._build_agreement()
        try:
            for rank_batch in self.device_batches.ahead(batches):
                window = self.take_step(rank_batch, window)
                if signals.received is not None:
                    self.stop(f"signal {signals.received.name}")
                if self.state.iteration == self.config.train.exit_iteration:
                    self.stop(f"train.exit_iteration={self.state.iteration}")
                    return
                # A signal or a callback may reach one rank only; all of them stop after the same step.
                if agreed(self._stop_reason is not None):
                    self._stop_reason = self._stop_reason or "another rank"
                    return
        finally:
            batches.close()

    def take_step(self, rank_batch: RankBatch, window: LogWindow) -> LogWindow:
        """One optimizer step on a batch, with all that surrounds it: metrics, callbacks, evaluation, saving."""
        self.phases.enter("step", step=self.state.iteration + 1)
        taken = self._run_step(rank_batch)
        if self.late_step is None:
            window = self._tell(taken, window, time.perf_counter())
        else:
            window = self._tell_untold(window, taken.started)
            self._untold = taken
        if self._evaluates_or_saves():
            window = self._tell_untold(window, time.perf_counter())
        self._evaluate_and_save_if_due()
        return window

    def _run_step(self, rank_batch: RankBatch) -> TakenStep:
        started = time.perf_counter()
        learning_rate = self.schedule(self.state.consumed_samples)
        self.group_schedules.prepare(self.optimizer.param_groups, self.state.consumed_samples)
        batches = self.device_batches.take(rank_batch)
        captured = self.graphs.begin_step() if self.graphs is not None else None
        if captured is not None:
            self.callbacks.on_message(self, captured)
        outcome: StepOutcome | PendingOutcome
        if self.late_step is None:
            outcome = self._traced_step(batches, learning_rate)
        else:
            outcome = self.late_step(batches, learning_rate, counted_tokens(rank_batch))
        self.state.iteration += 1
        self.state.consumed_samples += sum(len(samples) for samples in rank_batch.samples) * self.ctx.dp.size
        return TakenStep(rank_batch, outcome, self.state.iteration, self.state.consumed_samples, learning_rate, started)

    def _tell_untold(self, window: LogWindow, until: float) -> LogWindow:
        """What is left to tell of the step before."""
        taken, self._untold = self._untold, None
        return window if taken is None else self._tell(taken, window, until)

    def _tell(self, taken: TakenStep, window: LogWindow, until: float) -> LogWindow:
        """Judge a step by its loss and norm, and tell callbacks. until: when it ended."""
        outcome = taken.outcome.result()
        self._account(taken, outcome)
        self._check_first_loss(outcome)
        self._verify_replicas_if_due(taken.iteration)
        metrics = {
            "iteration": taken.iteration,
            "consumed_samples": taken.consumed_samples,
            "loss": outcome.loss,
            "grad_norm": outcome.grad_norm,
            "learning_rate": taken.learning_rate,
            "loss_scale": self.scaler.scale,
            "skipped_iterations": self.state.skipped_iterations,
            "tokens_per_second": outcome.tokens / (until - taken.started),
            **outcome.auxiliary,
        }
        if outcome.zeros_in_grad is not None:
            metrics["zeros_in_grad"] = outcome.zeros_in_grad
        self.callbacks.on_step_end(self, metrics)
        return self._log(metrics, outcome, window)

    def _traced_step(self, batches: list[Batch], learning_rate: float) -> StepOutcome:
        """The step, recorded if it is the one that the configuration asks for."""
        self._steps_taken += 1
        recorder, path = self.recorder, self.config.logging.trace_schedule
        if recorder is None or path is None or self._steps_taken != TRACED_STEP:
            return self.step(batches, learning_rate)
        recorder.begin(self.ctx.pp)
        outcome = self.step(batches, learning_rate)
        timeline = recorder.gather(self.ctx.pp)
        if self.ctx.is_writer:
            write_trace(timeline, Path(path))
            self.callbacks.on_message(self, f"schedule of step {self.state.iteration + 1} written to {path}")
        return outcome

    def _verify_replicas_if_due(self, iteration: int) -> None:
        interval = self.config.train.verify_replicas_interval
        if interval and iteration % interval == 0:
            self.weights.finish_gather()
            weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
            check_replicas(weights, parameter_layouts(self.model), self.ctx)

    def _account(self, taken: TakenStep, outcome: StepOutcome) -> None:
        if outcome.updated:
            self.recent_losses.add(outcome.loss)
            return
        self.state.skipped_iterations += 1
        if self.config.precision.dtype != "fp16" or self.scaler.exhausted:
            raise TrainingError(self._not_finite(taken, outcome))

    def _check_first_loss(self, outcome: StepOutcome) -> None:
        """Raise CheckpointError, or warn if that is asked for, when a resumed run does not go on where it stopped."""
        expected, self._expected_loss = self._expected_loss, None
        problem = expected.problem(outcome.loss) if expected is not None and outcome.updated else None
        if problem is None:
            return
        if self.config.checkpoint.resume_loss_check == "error":
            cure = "If the change is meant, add --set checkpoint.resume_loss_check=warn"
            raise CheckpointError(f"{self.resumed_from}: {problem}. Nothing has been saved since. {cure}")
        self.callbacks.on_message(self, f"warning: {problem}")

    def _not_finite(self, taken: TakenStep, outcome: StepOutcome) -> str:
        """Which quantity, at which step, from which samples, and what in the model was the first."""
        what = "loss" if not math.isfinite(outcome.loss) else "gradient norm"
        fault = first_fault(self.model, self.ctx)
        samples = [index for group in taken.rank_batch.samples for index in group]
        places = [self.train_data.describe(index) for index in samples[:4]] if _describes(self.train_data) else []
        more = f"; and {len(samples) - 4} more" if places and len(samples) > 4 else ""
        return (
            f"the {what} is not finite at iteration {taken.iteration} (loss {outcome.loss}, gradient norm "
            f"{outcome.grad_norm})"
            + (f"; of what was looked at, {fault} were the first" if fault else "")
            + f". The batch: samples {samples[0]} to {samples[-1]}"
            + (f", from {'; '.join(places)}{more}" if places else "")
            + ". The last checkpoint is from before this step; lower optimizer.lr, or look at the data"
        )

    def _log(self, metrics: dict[str, float | int], outcome: StepOutcome, window: LogWindow) -> LogWindow:
        """Every log_interval steps, and after the first: the loss averaged since the last time."""
        if outcome.updated:
            window.loss += outcome.loss
            window.steps += 1
        window.tokens += outcome.tokens
        if metrics["iteration"] % self.config.logging.log_interval and metrics["iteration"] != 1:
            return window
        seconds = time.perf_counter() - window.started
        averaged = {"loss": window.loss / max(window.steps, 1), "tokens_per_second": window.tokens / seconds}
        self.callbacks.on_log(self, {**metrics, **averaged, **self._metrics_of_layers()})
        return LogWindow()

    def _metrics_of_layers(self) -> dict[str, float]:
        """What layers report, of all pipeline stages."""
        own = {
            name: value
            for module in self.model.modules()
            if isinstance(module, ReportsMetrics)
            for name, value in module.metrics().items()
        }
        return merged_over_stages(own, self.ctx)

    def _evaluates_or_saves(self) -> bool:
        intervals = (self.config.train.eval_interval, self.config.checkpoint.save_interval)
        return any(interval and self.state.iteration % interval == 0 for interval in intervals)

    def _evaluate_and_save_if_due(self) -> None:
        iteration = self.state.iteration
        self._tell_committed(self.checkpoint_writer.committed())
        if self.config.train.eval_interval and iteration % self.config.train.eval_interval == 0:
            self.evaluate()
            self._last_evaluated = iteration
        if self.config.checkpoint.save_interval and iteration % self.config.checkpoint.save_interval == 0:
            self.save()

    def _finish(self) -> TrainResult:
        self._tell_untold(LogWindow(), time.perf_counter())
        if self._last_saved != self.state.iteration:
            self.save()
        if self._stop_reason is None and self._last_evaluated != self.state.iteration:
            self.evaluate()
        self.phases.enter("save")
        self._tell_committed(self.checkpoint_writer.finish())
        wait_for_all()
        return TrainResult(self.state, self.last_losses, self._reference_losses(), self._stop_reason)

    # -- data -----------------------------------------------------------------------------------

    def _batches(self, dataset: Dataset, steps: Iterable[tuple[int, int]]) -> Generator[RankBatch, None, None]:
        """This rank's batches of the given steps; close it to end the threads that read ahead."""
        reader = BatchReader(
            dataset,
            steps,
            micro_size=self.config.train.micro_batch_size,
            dp_rank=self.ctx.dp.rank,
            dp_size=self.ctx.dp.size,
            workers=self.config.data.num_workers,
            ahead=self.config.data.prefetch_batches,
        )
        model = self.ctx.axis("model")
        if self.config.data.read_by == "each" or model.size == 1:
            yield from reader
        else:
            yield from broadcast_batches(iter(reader) if model.rank == 0 else None, model)

    def _build_datasets(self, split: str) -> Mapping[str, Dataset]:
        return building.build_datasets(self.config, self.tokenizer, split, self.host)  # type: ignore[arg-type]

    def _build_train_data(self) -> Dataset:
        datasets = self._build_datasets("train")
        if not datasets:
            raise DataError(f"data.dataset_type={self.config.data.dataset_type} has no training samples")
        return datasets["train"]

    def _reference_losses(self) -> dict[str, float]:
        """Losses of simple models on the samples of the evaluation, from data sets that offer them."""
        measure = getattr(self.train_data, "reference_losses", None)
        valid = self.valid_data.get("valid")
        if measure is None or valid is None or self._stop_reason is not None:
            return {}
        return dict(measure(valid, range(self._evaluated_samples(valid))))

    def _evaluated_samples(self, dataset: Dataset) -> int:
        return min(self.config.train.eval_iters * self.batch_size.full, len(dataset))

    # -- resuming -------------------------------------------------------------------------------

    def _find_resume(self) -> Path | None:
        """The checkpoint to go on from, or an error before anything is built."""
        self._last_saved = self._last_evaluated = -1
        keys = self.loaded.config.checkpoint
        own = self.directory.find(keys.ckpt_step) if self.directory is not None else None
        if keys.resume == "never" and own is not None:
            raise CheckpointError(
                f"checkpoint.resume=never, but {own} exists; choose another --run-dir or remove that one"
            )
        found = own
        if own is None and keys.resume_from is not None:
            found = find_checkpoint(keys.resume_from, keys.ckpt_step)
        if found is None and (keys.resume == "required" or keys.ckpt_step is not None):
            where = self.directory.checkpoints if self.directory is not None else "no run directory was given, so it"
            key = "resume=required" if keys.resume == "required" else f"ckpt_step={keys.ckpt_step}"
            raise CheckpointError(f"checkpoint.{key}, but {where} has no checkpoint")
        return found

    def _restore(self) -> None:
        if self.resumed_from is not None:
            reader = open_checkpoint(self.resumed_from, self.host)
            changes = require_same_run(reader.metadata, self.config, str(self.resumed_from))
            if changes:
                self.callbacks.on_message(self, f"accepted changes:\n{change_table(changes)}")
            self.checkpointed().restore(reader)
            losses = list(reader.metadata.get("recent_losses", []))  # not in checkpoints from before this check
            self.recent_losses = RecentLosses(losses)
            self._expected_loss = expected_loss(losses) if is_comparable(change.key for change in changes) else None
            self._last_saved = self.state.iteration
        elif self.config.checkpoint.load is not None:
            reader = open_checkpoint(find_checkpoint(self.config.checkpoint.load), self.host)
            layouts = parameter_layouts(self.model)
            shapes = shapes_of_all_stages(layouts, self.ctx)
            self.not_loaded = fresh_parameters(reader, shapes, self.config.checkpoint)
            loaded = {name: layout for name, layout in layouts.items() if name not in self.not_loaded}
            self.checkpointed().load_model(reader, loaded)
            self.weights.refresh()

    def checkpointed(self) -> Checkpointed:
        """What of this run a checkpoint holds."""
        return Checkpointed(self.model, self.weights, self.optimizer, self.scaler, self.state, self.ctx)

    def _configured_callbacks(self) -> list[Callback]:
        named = self.loaded.config.train.callbacks
        specs = [spec for spec in self.host.callbacks if spec.always and spec.name not in named]
        specs += [self.host.callbacks.get(name, key="train.callbacks") for name in named]
        return [spec.build.load()(self.loaded.config) for spec in specs]

    def _configured_loss(self) -> Loss:
        loss = self.host.losses.get(self.config.train.loss, key="train.loss").build.load()(self.config, self.ctx)
        use_kernels([loss], self.kernels)
        return loss


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """torch refuses, by name, every operation that has no deterministic form."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _describes(dataset: Dataset) -> bool:
    return hasattr(dataset, "describe")
