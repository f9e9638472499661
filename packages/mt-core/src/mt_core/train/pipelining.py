"""The pipeline stages of a run, from its configuration, and the timeline of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.batch_invariance import batch_invariant
from mt_core.nn.loss import Loss
from mt_core.nn.model import contract, is_pipelined, model_options
from mt_core.optim.master_weights import MasterWeights
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.partition import balanced_stages, stages_by_keys, stages_from_layout
from mt_core.parallel.pipeline.pipeline import Pipeline
from mt_core.parallel.pipeline.schedule_run import Recorder
from mt_core.parallel.pipeline.schedule_tables import Action, Kind, stages_of_rank
from mt_core.parallel.pipeline.schedules import PipelineSchedule, configured_schedule
from mt_core.parallel.pipeline.stage import Pipelined, Stage
from mt_core.parallel.pipeline.trace import ScheduleRecorder, write_trace
from mt_core.plugins import PluginHost
from mt_core.specs import PLAIN_MODULE
from mt_core.train.step.batches import begin_micro_batch
from mt_core.train.step.forward_backward import (
    Batch,
    ForwardBackward,
    ForwardStep,
    LossShare,
    NoPipelining,
    default_forward_step,
    invariant_step,
)
from mt_core.train.step.optimizer_step import PendingOutcome
from mt_core.train.time_parts import TimeParts

MATRICES_OF_A_LAYER = 12
"""A transformer layer has about 12 hidden_size^2 weights."""


@dataclass(frozen=True)
class Stages:
    """all: of the model, in order. own: those of this process."""

    all: tuple[Stage, ...]
    own: tuple[Stage, ...]
    schedule: PipelineSchedule


def build_stages(config: Config, ctx: ParallelContext, host: PluginHost) -> Stages | None:
    """None without pipeline parallelism. Raises ConfigError when layers, stages and schedule do not fit."""
    parallel = config.parallel
    if parallel.pipeline_model_parallel_size == 1:
        return None
    stages = model_stages(config, host)
    schedule = configured_schedule(parallel, host)
    numbers = stages_of_rank(ctx.pp.rank, len(stages), ctx.pp.size, schedule.placement)
    return Stages(tuple(stages), tuple(stages[number] for number in numbers), schedule)


def model_stages(config: Config, host: PluginHost) -> list[Stage]:
    """All stages of a pipelined run. Needs no process group."""
    parallel, schedule = config.parallel, configured_schedule(config.parallel, host)
    each = parallel.virtual_pipeline_model_parallel_size or schedule.min_stages_per_rank
    count = parallel.pipeline_model_parallel_size * each
    # Only for its ConfigError.
    schedule.stages_per_rank(parallel.pipeline_model_parallel_size, count)
    num_layers = config.model.stacked_layers
    if config.model.family == PLAIN_MODULE:
        raise ConfigError(
            f"parallel.pipeline_model_parallel_size={parallel.pipeline_model_parallel_size}: a plain nn.Module has to "
            "declare its stages (the methods of mt_core.parallel.pipeline.stage.Pipelined) in a family of its own "
            "(docs/guides/plugins.md), or set the key to 1"
        )
    if num_layers is None:
        raise ConfigError(
            f"parallel.pipeline_model_parallel_size={parallel.pipeline_model_parallel_size}: "
            f"model.family={config.model.family} has no stack of layers to divide; it can be 1"
        )
    asked = stages_by_keys(parallel, num_layers, each, schedule.placement)
    if asked is not None:
        return asked
    # A family may define stage boundaries itself (the layer pattern of a hybrid model).
    layout = parallel.pipeline_model_parallel_layout or config.model.pipeline_layout
    if layout is not None:
        depth = getattr(config.model, "mtp_num_layers", None) or 0
        return stages_from_layout(layout, num_layers, count, mtp_num_layers=depth)
    return balanced_stages(num_layers, count, output_cost=output_cost(config))


def output_cost(config: Config) -> float:
    """Cost of the LM head and the loss, in units of a layer, by the number of weights multiplied."""
    hidden = getattr(config.model, "hidden_size", None)
    if hidden is None or config.model.vocab_size is None:
        return 0.0
    # vocab * hidden weights of the LM head over 12 * hidden^2 of a layer. 50257 ids at hidden size 1024 cost 4 layers.
    return float(config.model.vocab_size / (MATRICES_OF_A_LAYER * hidden))


class TimedActions:
    """A recorder that counts the time of the actions of a step; those of an evaluation are the evaluation's."""

    def __init__(self, time: TimeParts, recorder: Recorder | None) -> None:
        self.time, self.recorder = time, recorder

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        part = PARTS.get(action.kind, "communication") if self.time.current != "evaluate" else "evaluate"
        with self.time(part), self.recorder.span(action) if self.recorder is not None else nullcontext():
            yield


PARTS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward",
    Kind.BACKWARD_WEIGHT: "backward",
}
"""Other actions wait for another stage."""


class Pipelining:
    """Runs micro-batches through the pipeline stages of several processes (see forward_backward.ForwardBackward)."""

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        loss: Loss,
        ctx: ParallelContext,
        recorder: Recorder | None = None,
        begin: Callable[[Batch], object] = lambda batch: None,
        *,
        is_batch_invariant: bool = False,
    ) -> None:
        assert isinstance(model, Pipelined)
        self.within = partial(batch_invariant, is_batch_invariant)
        self.loss, self.recorder, self.ctx = loss, recorder, ctx
        inputs, options = contract(model).inputs, model_options(loss)
        self.pipeline = Pipeline(
            model,
            stages.all,
            stages.schedule,
            ctx,
            inputs=inputs,
            options=options,
            recorder=recorder,
            begin=begin,
            within=self.within,
        )

    def forward_backward(self, batches: Sequence[Batch], share: LossShare) -> Tensor:
        return self.pipeline.forward_backward(batches, self._share(share))

    def forward(self, batches: Sequence[Batch], share: LossShare) -> Tensor:
        return self.pipeline.forward(batches, self._share(share))

    def _share(self, share: LossShare) -> LossShare:
        def share_of_loss(output: Tensor, batch: Batch) -> Tensor:
            with self.within():
                return share(self.loss(output, batch), batch)

        return share_of_loss


def require_pipelined(model: nn.Module, config: Config) -> None:
    """Raises ConfigError for a family whose model cannot be cut into stages."""
    if not is_pipelined(model):
        size = config.parallel.pipeline_model_parallel_size
        raise ConfigError(
            f"parallel.pipeline_model_parallel_size={size}: model.family={config.model.family} cannot be cut into "
            "stages; it can be 1"
        )


def build_forward_backward(
    config: Config,
    ctx: ParallelContext,
    model: nn.Module,
    weights: MasterWeights,
    stages: Stages | None,
    loss: Loss,
    forward_step: ForwardStep | None,
    recorder: ScheduleRecorder | None,
    time: TimeParts | None = None,
) -> ForwardBackward:
    """time: where passes are counted; by default nowhere."""
    time = time or TimeParts()
    invariant = config.numerics.batch_invariant
    if stages is None:
        forward_step = forward_step or default_forward_step(loss)
        return NoPipelining(model, invariant_step(forward_step, invariant), weights, begin_micro_batch, time)
    require_pipelined(model, config)
    if forward_step is not None:
        raise ConfigError(
            f"parallel.pipeline_model_parallel_size={ctx.pp.size}: a custom forward_step runs the whole model at once, "
            "which no process has; give a loss instead"
        )
    timed = TimedActions(time, recorder)
    return Pipelining(model, stages, loss, ctx, timed, begin_micro_batch, is_batch_invariant=invariant)


# -- timeline of one step, in the file that logging.trace_schedule names -----------------------------

TRACED_STEP = 2
"""Counted from the first step of this process, which includes warm-up."""


class ScheduleTrace:
    """Runs the steps, and writes the timeline that `recorder` has of the one to trace."""

    def __init__(self, path: Path, ctx: ParallelContext) -> None:
        self.path, self.ctx = path, ctx
        self.recorder = ScheduleRecorder(ctx.device)
        self._steps_taken = 0

    def run(self, step: Callable[[], PendingOutcome], iteration: int) -> tuple[PendingOutcome, str | None]:
        """What `step` returns, and a note for the user if its timeline is written. Collective."""
        self._steps_taken += 1
        if self._steps_taken != TRACED_STEP:
            return step(), None
        # trace_schedule excludes deferred metrics (needs_numbers_at_once), so the step has ended when step() returns.
        self.recorder.begin(self.ctx.pp)
        pending = step()
        timeline = self.recorder.gather(self.ctx.pp)
        if self.ctx.is_writer:
            write_trace(timeline, self.path)
        return pending, f"schedule of step {iteration} written to {self.path}"
