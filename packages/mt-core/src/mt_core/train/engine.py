"""`Engine`: a model, its optimizer and its parallel layout, driven one step at a time by the caller's loop.

from mt_core.config import load_config
from mt_core.train import Engine

engine = Engine.build(load_config(preset="gpt-tiny"))
for rank_batch in engine.train_batches(dataset):
    outcome = engine.train_step(rank_batch)
    print(engine.state.iteration, outcome.loss)

`Trainer` adds the rest of a run: data sets, logging, callbacks, evaluation, checkpoints, stopping.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.checkpoint_lookup import find_checkpoint, open_checkpoint
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.config.loading import LoadedConfig, load_config
from mt_core.config.schema import Config
from mt_core.data.loader import BatchReader, RankBatch, cut_rank_batch
from mt_core.data.loss_weights import LossCounts, LossNormalization
from mt_core.data.training_length import BatchSizeSchedule, build_batch_size, total_train_samples
from mt_core.errors import ConfigError
from mt_core.interfaces import Dataset, Tokenizer
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.dropout import DropoutStreams, use_streams
from mt_core.nn.kernels.choice import Kernels, configured_kernels
from mt_core.nn.layout import ParameterLayout, parameter_layouts, stream_seed
from mt_core.nn.loss import Loss, ReportsEvaluation
from mt_core.nn.offload import offload_modules, require_offloaded
from mt_core.nn.plain_module import adopt_plain_module, is_plain, require_whole
from mt_core.optim.base import Optimizer, OptimizerBuildContext
from mt_core.optim.finalize_grads import GradFinalizer, TiedWeights, find_tied_weights
from mt_core.optim.loss_scale import LossScaler, build_loss_scaler
from mt_core.optim.master_weights import MasterWeights
from mt_core.optim.param_groups import GroupSchedules
from mt_core.optim.schedules import LRSchedule
from mt_core.parallel.collectives import all_gather
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.first_rank import on_first_rank
from mt_core.parallel.reductions import any_over
from mt_core.plugins import PluginHost, load_plugins
from mt_core.train import build
from mt_core.train.auto_choices import updates_in_one_kernel, with_resolved_main_weights
from mt_core.train.build import kept_files
from mt_core.train.checkpoint.partial_load import load_weights
from mt_core.train.checkpoint.run_directory import RunDirectory
from mt_core.train.checkpoint.saving import CheckpointContents, build_checkpoint_writer
from mt_core.train.checkpoint.state import (
    OPTIMIZER,
    WITHOUT_OPTIMIZER,
    RunState,
    dropout_stream,
    merged_over_stages,
)
from mt_core.train.cuda_graphs.capture import use_capture_stream
from mt_core.train.cuda_graphs.rules import build_graphs
from mt_core.train.cuda_graphs.runs import BlockGraphs
from mt_core.train.cuda_graphs.steps import StepGraphs
from mt_core.train.hugging_face_source import (
    PreTrainedConfigLike,
    PreTrainedModelLike,
    read_source,
    with_sections,
)
from mt_core.train.losses import KeptLogits, WrapLoss, build_losses
from mt_core.train.memory import keep_freed_memory
from mt_core.train.pipelining import ScheduleTrace, Stages, build_forward_backward, build_stages
from mt_core.train.predictions import Predictions, evaluate, predict
from mt_core.train.same_start import require_same_program
from mt_core.train.state import TrainState
from mt_core.train.step.batches import DeviceBatches, broadcast_batches
from mt_core.train.step.forward_backward import Batch, ForwardBackward, ForwardStep
from mt_core.train.step.optimizer_step import (
    OptimizerStep,
    PendingOutcome,
    StepOutcome,
    defers_metrics,
)
from mt_core.train.step.split_step import SplitStep
from mt_core.train.time_parts import TimeParts


@dataclass(frozen=True)
class StepRecord:
    """A launched step. iteration, consumed_samples: after it. num_samples: of all ranks. started: by perf_counter.
    notes: for the user."""

    rank_batch: RankBatch
    pending: PendingOutcome
    iteration: int
    consumed_samples: int
    num_samples: int
    learning_rate: float
    started: float
    notes: tuple[str, ...] = ()


@dataclass
class Engine:
    """The components of a training run, each built once from the configuration, and its training step.

    config: resolved, with model.vocab_size, train.loss and optimizer.main_weights. stages: None without pipeline
    parallelism. copies: tied weights of several stages. malloc: what was made of train.keep_freed_memory. Construction
    is collective over all ranks.
    """

    config: Config
    host: PluginHost
    device: torch.device
    tokenizer: Tokenizer
    ctx: ParallelContext
    stages: Stages | None
    kernels: Kernels
    model: nn.Module
    layouts: Mapping[str, ParameterLayout]
    copies: TiedWeights
    weights: MasterWeights
    optimizer: Optimizer
    schedule: LRSchedule
    group_schedules: GroupSchedules
    batch_size: BatchSizeSchedule
    scaler: LossScaler
    graphs: BlockGraphs | StepGraphs | None
    trace: ScheduleTrace | None
    loss: Loss
    forward_backward: ForwardBackward
    step: OptimizerStep
    device_batches: DeviceBatches
    malloc: str | None
    flops_per_sample: float | None = None
    """FLOPs of training on one sample, as the model family counts them; None if it does not."""
    kept_logits: KeptLogits | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    """What checkpoints hold beside tensors, by name: of the tokenizer, and see `keep_files`."""
    state: TrainState = field(default_factory=TrainState)
    time: TimeParts = field(default_factory=TimeParts)
    """Where the time of this rank goes."""
    complete_batch: Callable[[RankBatch], RankBatch] | None = None
    """Adds to batches of validation the fields that no data set has (`BatchSource.complete`)."""

    @classmethod
    def build(
        cls,
        loaded: LoadedConfig,
        *,
        host: PluginHost | None = None,
        model: nn.Module | None = None,
        loss: Loss | None = None,
        forward_step: ForwardStep | None = None,
        model_provider: build.ModelProvider | None = None,
        wrap_loss: WrapLoss | None = None,
        weights: CheckpointReader | None = None,
        return_logits: bool = False,
    ) -> Engine:
        """Arguments replace the components that the configuration names (see `Trainer`). Collective.

        model_provider: builds the model of this layout. wrap_loss: makes the loss to train with from the configured
        one, which takes the model's outputs (logits sharded over the vocabulary under tensor parallelism). weights:
        in place of initial ones, as checkpoint.load has them. return_logits: outcomes of steps have the model's logits.
        """
        parts = TimeParts()
        host = host or load_plugins()
        config, tokenizer, device = build.resolve_config(loaded, host)
        # Before any group is made, so that no rank waits for one that raises.
        plain = model is not None and is_plain(model)
        if model is not None and plain:
            require_whole(model, config.parallel)
        require_same_program(config, tokenizer, host)
        build.require_process_group()
        ctx = build.build_context(config, device)
        parts.observe(device, ctx)
        # First of all work on the device: hooks on gradients belong to the stream on which they are registered.
        if config.train.cuda_graphs != "none" and device.type == "cuda":
            use_capture_stream(device)
        stages = build_stages(config, ctx, host)
        own_stages = stages.own if stages is not None else None
        kernels = configured_kernels(config, ctx)
        config = with_resolved_main_weights(config, in_one_kernel=updates_in_one_kernel(kernels))
        flops_per_sample = build.count_flops(config, host) if model is None else None
        if model is not None and plain:
            adopt_plain_module(model, ctx)
        if model is None:
            model = build.build_initialized_model(config, ctx, host, own_stages, kernels, model_provider)
        else:
            all_stages = stages.all if stages is not None else None
            context = ModelBuildContext(config, ctx, host, own_stages, kernels, all_stages)
            model = build.transform_model(model, context)
        offloaded = offload_modules(model, config.recompute)
        if config.recompute.offload_modules:
            require_offloaded(config.recompute, merged_over_stages(dict.fromkeys(offloaded, True), ctx))
        # Before graphs are built, which wrap the forward of the layers as they find it.
        build.compile_blocks(model, config)
        # Read before build_weights(), which under FSDP2 replaces the parameters by DTensors.
        layouts = parameter_layouts(model)
        build.require_used_patterns("train.frozen_parameters", config.train.frozen_parameters, layouts, ctx)
        if not any_over(any(layout.trained for layout in layouts.values()), axis=ctx.world, device=device):
            raise ConfigError("train.frozen_parameters leaves nothing to train; name fewer parameters")
        malloc = keep_freed_memory(config, model, ctx, host)
        copies = find_tied_weights([name for name, _ in model.named_parameters()], ctx)
        main_weights = build.build_weights(config, model, ctx, copies, host)
        environment = OptimizerBuildContext(model, main_weights, layouts, ctx, kernels)
        optimizer = build.build_optimizer(config, environment, host)
        use_streams(model, DropoutStreams(config.train.seed))
        graphs = build_graphs(model, main_weights, optimizer, config, ctx, own_stages)
        losses = build_losses(config, environment, host, loss, wrap_loss, return_logits=return_logits)
        config = losses.config
        trace = _build_trace(config, ctx, stages)
        recorder = trace.recorder if trace is not None else None
        forward_backward = build_forward_backward(
            config, ctx, model, main_weights, stages, losses.trained, forward_step, recorder, parts
        )
        # Over all stages: a kernel may serve a layer that only another stage has.
        kernels.require_used(merged_over_stages(dict.fromkeys(kernels.picked, True), ctx))
        scaler = build_loss_scaler(config.precision)
        step = OptimizerStep(
            model,
            main_weights,
            optimizer,
            forward_backward,
            scaler,
            config.optimizer.clip_grad,
            GradFinalizer(
                layouts,
                ctx,
                copies,
                sharded=build.shards_state(config),
                over_instances=build.shards_over_instances(config),
            ),
            count_zeros=config.logging.log_num_zeros_in_grad,
            deferred=defers_metrics(config, ctx, optimizer),
            capture=graphs if isinstance(graphs, StepGraphs) else None,
            time=parts,
        )
        # After initialization, which draws from generators of its own, so that steps start from a defined state.
        torch.manual_seed(stream_seed(config.train.seed, dropout_stream(ctx)))
        engine = cls(
            config=config,
            host=host,
            device=device,
            tokenizer=tokenizer,
            ctx=ctx,
            stages=stages,
            kernels=kernels,
            model=model,
            layouts=layouts,
            copies=copies,
            weights=main_weights,
            optimizer=optimizer,
            schedule=build.build_schedule(config, host),
            group_schedules=build.build_group_schedules(config, host),
            batch_size=build_batch_size(config),
            scaler=scaler,
            graphs=graphs,
            trace=trace,
            loss=losses.trained,
            forward_backward=forward_backward,
            step=step,
            device_batches=DeviceBatches(device, ctx.cp, LossNormalization.configured(config.train, ctx.dp.size)),
            flops_per_sample=flops_per_sample,
            malloc=malloc,
            kept_logits=losses.kept_logits,
            time=parts,
        )
        engine.keep_files(weights)
        # Last: the optimizer's master weights exist and are set too.
        if weights is not None:
            load_weights(weights, engine.checkpointed(), layouts, config, host)
        return engine

    @classmethod
    def from_hugging_face(
        cls,
        source: PreTrainedModelLike | PreTrainedConfigLike,
        sections: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        host: PluginHost | None = None,
        loss: Loss | None = None,
        wrap_loss: WrapLoss | None = None,
        forward_step: ForwardStep | None = None,
        return_logits: bool = False,
    ) -> Engine:
        """The engine for a model of transformers, with its weights, or for its configuration, with initial weights.

        sections: of the configuration, section -> key -> value; they win over what the source says. Every rank gives
        the same source, and takes its shards. Collective. Raises ConfigError for a model_type of no family, and
        CheckpointError for weights that do not fit their configuration.
        """
        host = host or load_plugins()
        source_sections, weights = read_source(source, host)
        loaded = load_config(sections=with_sections(source_sections, sections), host=host)
        return cls.build(
            loaded,
            host=host,
            loss=loss,
            wrap_loss=wrap_loss,
            forward_step=forward_step,
            weights=weights,
            return_logits=return_logits,
        )

    # -- batches ----------------------------------------------------------------------------------

    @property
    def total_samples(self) -> int:
        """Samples that the whole run trains on."""
        return total_train_samples(self.config)

    def remaining_steps(self) -> Iterable[tuple[int, int]]:
        """(first sample, number of samples) of each step from the current state to the end of the run."""
        return self.batch_size.steps(self.state.consumed_samples, self.total_samples)

    def train_batches(self, dataset: Dataset) -> Generator[RankBatch, None, None]:
        """This rank's batches of the remaining steps, copied to the device one step ahead."""
        batches = self.read_batches(dataset, self.remaining_steps())
        try:
            yield from self.device_batches.ahead(batches)
        finally:
            batches.close()

    def read_batches(self, dataset: Dataset, steps: Iterable[tuple[int, int]]) -> Generator[RankBatch, None, None]:
        """This rank's batches of the given steps. Closing the iterator ends the prefetch threads."""
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
        # The ranks of one copy of the model take the same samples.
        if self.config.data.read_by == "each" or model.size == 1:
            yield from reader
        else:
            yield from broadcast_batches(iter(reader) if model.rank == 0 else None, model)

    def rank_batch(self, tensors: Mapping[str, Tensor]) -> RankBatch:
        """This rank's samples of the next step, [rows, ...] by the fields of the model and the loss, for `train_step`.

        Every data-parallel rank has as many rows, of samples of its own; ranks that share a model have the same ones.
        `loss_mask` may be among the fields: the weight of each position's loss. Raises DataError for tensors of
        different lengths.
        """
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
        dp, size = self.ctx.dp, self.config.train.micro_batch_size
        return cut_rank_batch(arrays, self.state.consumed_samples, size, dp.rank, dp.size)

    def gather(self, tensor: Tensor) -> Tensor:
        """[rows, ...] of each data-parallel rank -> those of all, [ranks * rows, ...], on every rank. Collective."""
        rows = tensor.detach()
        return all_gather(rows, 0, self.ctx.dp) if self.ctx.dp.size > 1 else rows

    # -- steps ------------------------------------------------------------------------------------

    def train_step(self, rank_batch: RankBatch, learning_rate: float | None = None) -> StepOutcome:
        """One optimizer step on this rank's batch; waits for its loss and gradient norm. learning_rate: in place of the
        schedule's."""
        outcome = self.launch_step(rank_batch, learning_rate).pending.result()
        return replace(outcome, logits=self.take_logits())

    def launch_step(self, rank_batch: RankBatch, learning_rate: float | None = None) -> StepRecord:
        """Run `train_step` without waiting for the device if `step.deferred`. Advances the counters of `state`."""
        started = time.perf_counter()
        if self.kept_logits is not None:
            self.kept_logits.begin()
        learning_rate = self.next_learning_rate() if learning_rate is None else learning_rate
        batches = self.device_batches.take(rank_batch)
        captured = self.graphs.begin_step() if self.graphs is not None else None
        # On the host, from the arrays: counting on the device would make the host wait for it.
        counts = self.normalization.counts(rank_batch.micro_batches)
        pending, traced = self._step(batches, learning_rate, counts)
        num_samples = sum(len(samples) for samples in rank_batch.samples) * self.ctx.dp.size
        # A step that is skipped on the device ends training.
        self.state.count(num_samples, updated=not pending.skipped)
        return StepRecord(
            rank_batch,
            pending,
            self.state.iteration,
            self.state.consumed_samples,
            num_samples,
            learning_rate,
            started,
            tuple(note for note in (captured, traced) if note is not None),
        )

    def begin_step(self, micro_batches: int = 1) -> SplitStep:
        """A step whose forward and backward passes the caller runs. Raises ConfigError under pipeline and context
        parallelism."""
        return SplitStep(self, micro_batches)

    def next_learning_rate(self) -> float:
        """Learning rate of the next step, by the schedule; sets what single parameter groups have beside it."""
        self.group_schedules.prepare(self.optimizer.param_groups, self.state.schedule_samples)
        return self.schedule(self.state.schedule_samples)

    def _step(
        self, batches: list[Batch], learning_rate: float, counts: LossCounts
    ) -> tuple[PendingOutcome, str | None]:
        """The outcome, and a note if the timeline of this step is written."""
        step = partial(self.step, batches, learning_rate, counts)
        return self.trace.run(step, self.state.iteration + 1) if self.trace is not None else (step(), None)

    def eval_step(self, rank_batch: RankBatch) -> float:
        """The loss of the batches of all ranks, normalized as in training; changes no weight and no counter. Its logits
        are those that `take_logits` gives."""
        # With overlapped gathers the layers' hooks wait for their own weights, but only expect() waits for those that
        # are used before any layer, and evaluation does not call it.
        self.weights.finish_gather()
        if self.kept_logits is not None:
            self.kept_logits.begin()
        return evaluate(self.model, [self._evaluated(rank_batch)], self.forward_backward, self.ctx)

    def take_logits(self) -> Tensor | None:
        """This rank's logits of the last step or evaluated batch, once; None without return_logits, and on ranks
        without the last pipeline stage. Collective over tensor-parallel ranks."""
        return self.kept_logits.take() if self.kept_logits is not None else None

    def evaluate(self, dataset: Dataset) -> float:
        """Mean loss over the first train.eval_iters global batches, or over all samples (train.full_validation): the
        same samples every time."""
        self.weights.finish_gather()
        # A kept batch of logits [rows, S, vocabulary] would add to the peak of memory.
        self.take_logits()  # no longer kept
        steps = (self._evaluated(rank_batch) for rank_batch in self._evaluation_batches(dataset))
        return evaluate(self.model, steps, self.forward_backward, self.ctx)

    def predict(self, dataset: Dataset) -> Predictions:
        """The outputs and losses of the samples that `evaluate` takes, each computed once; on every rank. Collective.

        Raises ConfigError as `require_predictions` does.
        """
        self.require_predictions()
        self.weights.finish_gather()
        steps = (
            (rank_batch.samples, self.device_batches.take(rank_batch))
            for rank_batch in self._evaluation_batches(dataset)
        )
        return predict(self.model, steps, self.loss, self.evaluated_samples(dataset), self.ctx)

    def require_predictions(self) -> None:
        """Raise ConfigError for a layout in which no process has a model's whole outputs."""
        for key in ("pipeline_model_parallel_size", "context_parallel_size"):
            size = getattr(self.config.parallel, key)
            if size > 1:
                raise ConfigError(
                    f"parallel.{key}={size}: metrics take whole outputs, which no process has; set it to 1, or "
                    "train.eval_metrics=[]"
                )

    @property
    def normalization(self) -> LossNormalization:
        return self.device_batches.normalization

    def _evaluated(self, rank_batch: RankBatch) -> tuple[list[Batch], float]:
        """The batch on the device, and this data-parallel rank's part of the divisor of its loss."""
        return self.device_batches.take(rank_batch), self.normalization.counts(rank_batch.micro_batches).divisor

    def _evaluation_batches(self, dataset: Dataset) -> Iterator[RankBatch]:
        # Batches of the full size also during a ramp-up, so that the value does not depend on when it is computed.
        size, count = self.batch_size.full, self.evaluated_samples(dataset)
        # The last batch may be short; a rank without a sample in it computes a micro-batch that does not count.
        steps = [(first, min(size, count - first)) for first in range(0, count, size)]
        batches = self.read_batches(dataset, steps)
        if self.complete_batch is None:
            yield from self.device_batches.ahead(batches)
        else:
            yield from map(self.complete_batch, batches)

    def evaluation_metrics(self) -> Mapping[str, float]:
        """What the loss reports of the batches of `evaluate` beside its mean. Collective."""
        return self.loss.take_metrics() if isinstance(self.loss, ReportsEvaluation) else {}

    def evaluated_samples(self, dataset: Dataset) -> int:
        if self.config.train.full_validation:
            return len(dataset)
        return min(self.config.train.eval_iters * self.batch_size.full, len(dataset))

    # -- checkpoints ------------------------------------------------------------------------------

    def checkpointed(self) -> RunState:
        """The checkpointed state of this run."""
        return RunState(self.model, self.weights, self.optimizer, self.scaler, self.state, self.ctx)

    def contents(self, *, with_optimizer: bool = True, **metadata: Any) -> CheckpointContents:
        """What a checkpoint of this step holds. metadata: further entries."""
        state = self.checkpointed()
        fragments = state.fragments()
        if not with_optimizer:
            fragments = [fragment for fragment in fragments if not fragment.name.startswith(OPTIMIZER)]
            metadata[WITHOUT_OPTIMIZER] = True
        return CheckpointContents(fragments, {**state.metadata(self.config), **metadata}, dict(self.files))

    def keep_files(self, source: CheckpointReader | None) -> None:
        """Let checkpoints have the files that belong to the model in the one that this run starts from: of generation
        and processors, and the chat template. Raises ConfigError for a template that cannot be read."""
        self.files = kept_files(self.config, self.tokenizer, source, self.host)

    def save_state(self, run_dir: str | Path, *, with_optimizer: bool = True) -> Path:
        """Write a checkpoint of this step as `Trainer` does, at once: `mt train --run-dir` continues from it, and every
        command that takes a checkpoint reads it. with_optimizer: with the optimizer's state, without which training
        cannot continue unchanged. Returns its path. Collective."""
        directory = RunDirectory(run_dir)
        # No rank writes into a directory that is not there yet.
        on_first_rank(directory.create, self.ctx.world)
        # The caller may use the file, or end the process, as soon as this returns.
        keys = self.config.checkpoint.model_copy(update={"async_save": False})
        path = directory.checkpoint(self.state.iteration)
        writer = build_checkpoint_writer(keys, self.host, directory, self.ctx)
        writer.write(path, self.contents(with_optimizer=with_optimizer))
        writer.finish()
        return path

    def load_state(self, path: str | Path, *, with_optimizer: bool = True) -> None:
        """Weights, optimizer, counters and random streams of a run directory's newest checkpoint, or of a checkpoint,
        that any layout wrote. with_optimizer=False leaves the optimizer's state as it is. Collective. Raises
        CheckpointError when the checkpoint is missing, damaged, of another model, or without optimizer state."""
        reader, state = open_checkpoint(find_checkpoint(path), self.host), self.checkpointed()
        if with_optimizer:
            state.restore(reader)
        else:
            state.restore_without_optimizer(reader)
        self.keep_files(reader)


def _build_trace(config: Config, ctx: ParallelContext, stages: Stages | None) -> ScheduleTrace | None:
    path = config.logging.trace_schedule
    return ScheduleTrace(Path(path), ctx) if path is not None and stages is not None else None
