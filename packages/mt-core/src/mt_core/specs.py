"""What plugins register, except checkpoint formats (`checkpoint_specs`): a spec, the calls behind it and a `Kind` each.

This module must stay free of heavy imports: every plugin imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mt_core.checkpoint_specs import CheckpointReader
from mt_core.interfaces import AttentionRequest, Dataset, MoeDispatcher, SampleField, SplitRequest, Tokenizer
from mt_core.kinds import Kind, Lazy, Spec

if TYPE_CHECKING:
    import numpy as np
    import torch


PLAIN_MODULE = "module"
"""The model family of a torch.nn.Module that a program gives; mt-core registers it."""


class BuildModel(Protocol):
    def __call__(self, config: Any, context: Any) -> torch.nn.Module:
        """config: of the spec's config_type. context: a mt_core.nn.build_context.ModelBuildContext."""
        ...


@dataclass(frozen=True, kw_only=True)
class StartsFrom:
    """How a model starts from the checkpoint of another family (checkpoint.load), whose parameters it has otherwise.

    Patterns are of names of parameters; * stands for anything.
    """

    family: str
    initialized: tuple[str, ...]
    """Patterns of parameters that the other family does not have, and which keep their initial values."""
    left_out: tuple[str, ...] = ()
    """Patterns of tensors that the other family has in addition."""
    own_keys: tuple[str, ...] = ()
    """Keys of [model] that do not come from the checkpoint."""
    keys: Lazy[ModelKeys] | None = None
    """This family's keys of [model] for those of the checkpoint. Default: the same ones."""


class ModelKeys(Protocol):
    def __call__(self, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        """stored: the section [model] of the checkpoint. Raises ConfigError for a model that this family cannot be."""
        ...


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Spec):
    """A model family, selected by `model.family`.

    The module that `build` returns declares its parameters with `mt_core.nn.layout`, which gives each
    one its canonical name and layout. `presets` loads a mapping from preset name to a partial config
    tree (at least its `model` section). `name_maps` are keyed by external format ("hf").
    """

    config_type: Lazy[type]
    build: Lazy[BuildModel]
    presets: Lazy[Mapping[str, Mapping[str, Any]]]
    default_loss: str = "cross_entropy"
    """The loss that `train.loss=auto` stands for."""
    check: Lazy[CheckConfig] | None = None
    """Raises ConfigError for a whole configuration that no model of this family can be built or trained from."""
    name_maps: Mapping[str, Lazy[Any]] = field(default_factory=dict)
    shrink: Lazy[ShrinkModel] | None = None
    """Makes the model small, for checks on a few CPU processes, in keys of the family."""
    starts_from: tuple[StartsFrom, ...] = ()
    """The families whose checkpoints such a model may start from, beside its own."""
    training_flops: Lazy[CountFlops] | None = None
    """FLOPs of a sample, for the throughput of training; None: training reports tokens per second only."""
    adapt: Lazy[AdaptCheckpoint] | None = None
    """The checkpoint of another family under this one's names, for checkpoint.load; None: only this family's load."""


MODELS = Kind("models", "a model family", ModelSpec, "mt-models")


class AdaptCheckpoint(Protocol):
    def __call__(self, reader: CheckpointReader, config: Any, host: Any) -> CheckpointReader:
        """config: the mt_core.config.Config of the model that starts from it. host: the PluginHost.

        Returns the reader itself for a family that it takes nothing from. Raises ConfigError for a model of the other
        family that computes something else than the parts of this one.
        """
        ...


class CountFlops(Protocol):
    def __call__(self, config: Any) -> float | None:
        """Floating-point operations of the matrix products of a sample, forward and backward, without recomputation.
        None: a part of the model is of a family that does not count them.

        config: a mt_core.config.Config with model.vocab_size. Scores count for the keys that a query sees.
        """
        ...


class ShrinkModel(Protocol):
    def __call__(self, model: Mapping[str, Any], seq_length: int) -> Mapping[str, Any]:
        """model: the section as a tree, its layers, widths and experts small already. seq_length: of the small samples.
        Returns keys and their values."""
        ...


class BuildTokenizer(Protocol):
    def __call__(self, config: Any) -> Tokenizer: ...


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec(Spec):
    """A tokenizer, selected by `tokenizer.tokenizer_type`."""

    config_type: Lazy[type]
    build: Lazy[BuildTokenizer]
    materialize: Lazy[MaterializeTokenizer] | None = None
    """Lays the files of a checkpoint into a folder and returns the config that names them there; None:
    `build` needs no files."""


TOKENIZERS = Kind("tokenizers", "a tokenizer", TokenizerSpec, "mt-data")


class MaterializeTokenizer(Protocol):
    def __call__(self, config: Any, files: Mapping[str, bytes], directory: Path) -> Any: ...


class BuildDataset(Protocol):
    def __call__(
        self, config: Any, tokenizer: Tokenizer, request: SplitRequest
    ) -> Dataset | Mapping[str, Dataset] | None: ...


@dataclass(frozen=True, kw_only=True)
class DatasetSpec(Spec):
    """A data set, selected by `data.dataset_type`. `build` returns None for a split without data,
    and several data sets by name for several validation sets."""

    config_type: Lazy[type]
    build: Lazy[BuildDataset]
    sample: tuple[SampleField, ...]
    checkpoint_files: Lazy[CheckpointFiles] | None = None
    """The files of a run's checkpoints, such as its chat template; None: the data set adds none."""


DATASETS = Kind("datasets", "a data set", DatasetSpec, "mt-data")


class CheckpointFiles(Protocol):
    """The files that checkpoints of a run with this [data] section hold, by name.

    files: those of the tokenizer, and those beside them in the checkpoint that the run starts from. Raises ConfigError.
    """

    def __call__(self, config: Any, tokenizer: Tokenizer, files: Mapping[str, bytes]) -> Mapping[str, bytes]: ...


TRAINED_TEMPLATE = "trained_chat_template.jinja"
"""In a checkpoint: the chat template that the model was trained with, where it is not its tokenizer's own. A name of
its own, since a template among the tokenizer's files would change the tokenizer's fingerprint."""


class BuildMoeDispatcher(Protocol):
    def __call__(self, config: Any, placement: Any) -> MoeDispatcher:
        """config: of the spec's config_type, which checks model.moe.moe_dispatcher_options. placement: mt_moe's
        ExpertPlacement."""
        ...


@dataclass(frozen=True, kw_only=True)
class MoeDispatcherSpec(Spec):
    """Carries tokens between ranks, selected by `model.moe.moe_token_dispatcher_type`."""

    config_type: Lazy[type]
    build: Lazy[BuildMoeDispatcher]


MOE_DISPATCHERS = Kind("moe_dispatchers", "a token dispatcher", MoeDispatcherSpec, "mt-moe")


class BuildFeedForward(Protocol):
    def __call__(self, config: Any, context: Any, layer: int) -> torch.nn.Module:
        """A module [batch, sequence, hidden] -> the same.

        config: the model's. context: a mt_core.nn.build_context.ModelBuildContext. layer: its number in the model, from
        0.
        """
        ...


class UpcycleFeedForward(Protocol):
    def __call__(self, reader: CheckpointReader, host: Any, *, num_experts: int, granularity: int) -> CheckpointReader:
        """The checkpoint with this block in place of the dense ones. host: the PluginHost."""
        ...


@dataclass(frozen=True, kw_only=True)
class FeedForwardSpec(Spec):
    """The block after attention: "dense", "moe", ..."""

    config_type: Lazy[type]
    build: Lazy[BuildFeedForward]
    upcycle: Lazy[UpcycleFeedForward] | None = None
    """None: dense feed-forwards cannot become such blocks."""


FEED_FORWARDS = Kind("feed_forwards", "a feed-forward", FeedForwardSpec, "mt-core", homes={"moe": "mt-moe"})


class SupportsAttention(Protocol):
    def __call__(self, request: AttentionRequest) -> bool | str:
        """True, or the reason why not."""
        ...


class BuildAttention(Protocol):
    def __call__(self, request: AttentionRequest, *, softmax_in_fp32: bool) -> Any:
        """A mt_core.nn.attention.AttentionCore."""
        ...


@dataclass(frozen=True, kw_only=True)
class AttentionBackendSpec(Spec):
    """Computes attention, selected by `model.attention_backend`."""

    supports: Lazy[SupportsAttention]
    build: Lazy[BuildAttention]


ATTENTION_BACKENDS = Kind("attention_backends", "an attention backend", AttentionBackendSpec, "mt-core")


@dataclass(frozen=True, kw_only=True)
class PipelineScheduleSpec(Spec):
    """An order of forward and backward passes over pipeline stages, selected by `parallel.pipeline_schedule`."""

    schedule: Lazy[Any]
    """A mt_core.parallel.pipeline.PipelineSchedule of the same name."""


PIPELINE_SCHEDULES = Kind("pipeline_schedules", "a pipeline schedule", PipelineScheduleSpec, "mt-core")


class BuildContextParallelAttention(Protocol):
    def __call__(self, axes: Sequence[Any], core: Any) -> Any:
        """A mt_core.nn.attention.AttentionCore over sharded sequences.

        core: attention of whole sequences on one rank. The result takes q [B, S / CP, N, D], k and v [B, S / CP, G, D]
        of this rank's tokens, in the order of mt_core.nn.context_parallel.shard_sequence. axes: the context-parallel
        axis, or (inner, outer) of a hierarchical method.
        """
        ...


class CheckContextParallelSizes(Protocol):
    def __call__(self, sizes: Sequence[int], heads: int) -> None:
        """Raises ConfigError for sizes of the axes, and query heads of a tensor-parallel rank, that the method cannot
        serve."""
        ...


@dataclass(frozen=True, kw_only=True)
class ContextParallelMethodSpec(Spec):
    """How attention reaches the keys of other ranks of a sequence, selected by `parallel.cp_comm_type`."""

    build: Lazy[BuildContextParallelAttention]
    check: Lazy[CheckContextParallelSizes] | None = None
    hierarchical: bool = False
    """Whether it takes two axes, of the sizes parallel.hierarchical_context_parallel_sizes."""
    whole_sequences: bool = False
    """Whether `core` sees whole sequences, so that what it can compute (a soft cap on scores) is served."""


CONTEXT_PARALLEL_METHODS = Kind(
    "context_parallel_methods", "a context-parallel method", ContextParallelMethodSpec, "mt-core"
)


class BuildOptimizer(Protocol):
    def __call__(self, config: Any, param_groups: list[dict[str, Any]], context: Any) -> Any:
        """A mt_core.optim.base.Optimizer, as those of torch.optim are.

        config: of the spec's config_type. param_groups: shards of parameters, possibly empty. context: a
        mt_core.optim.build_context.OptimizerBuildContext, for an optimizer that looks at whole weights.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(Spec):
    """An optimizer, selected by `optimizer.optimizer`."""

    config_type: Lazy[type]
    build: Lazy[BuildOptimizer]


OPTIMIZERS = Kind("optimizers", "an optimizer", OptimizerSpec, "mt-core")


class BuildLRSchedule(Protocol):
    def __call__(self, config: Any, horizon: Any) -> Any:
        """A mt_core.optim.schedules.LRSchedule: consumed samples -> learning rate. horizon: its Horizon."""
        ...


@dataclass(frozen=True, kw_only=True)
class LRScheduleSpec(Spec):
    """A learning-rate decay, selected by `lr_schedule.lr_decay_style`."""

    config_type: Lazy[type]
    build: Lazy[BuildLRSchedule]


LR_SCHEDULES = Kind("lr_schedules", "a learning-rate schedule", LRScheduleSpec, "mt-core")


class BuildLoss(Protocol):
    def __call__(self, config: Any, parallel: Any) -> Callable[..., torch.Tensor]:
        """(output of the model, batch) -> losses [batch, sequence]. config: a mt_core.config.Config. parallel: the
        ParallelContext."""
        ...


@dataclass(frozen=True, kw_only=True)
class LossSpec(Spec):
    """A loss, selected by `train.loss`: per-position losses, which the trainer masks, sums and divides."""

    build: Lazy[BuildLoss]
    equivalent_to: str | None = None
    """The loss of the same values that this is another implementation of. A run may be resumed with either."""
    in_nats_per_token: bool = False
    """Whether it is the cross entropy of each predicted token, in nats, so that divided by ln 2 it is bits a token."""
    compares_samples: bool = False
    """Whether a sample's loss depends on the others of the micro-batch, on all data-parallel ranks."""
    metrics: Mapping[str, Lazy[Metric]] = field(default_factory=dict)
    """Metrics of the model's outputs, by the name that train.eval_metrics gives them; only of losses [batch]."""


LOSSES = Kind("losses", "a loss", LossSpec, "mt-core")


class Metric(Protocol):
    def __call__(self, outputs: np.ndarray, labels: np.ndarray) -> float:
        """outputs: [N, ...] of the model, fp32. labels: [N], of the samples that have one; N may be 0. The higher, the
        better."""
        ...


class BuildBatchSource(Protocol):
    def __call__(self, run: Any) -> Any:
        """A mt_core.train.batch_source.BatchSource. run: the mt_core.train.Trainer, its weights restored.

        Called on all ranks. Raises ConfigError.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class BatchSourceSpec(Spec):
    """Gives the batches of a run in place of the data set alone, selected by `train.batch_source`: samples that the
    model draws, or fields that the loss needs and a model computes (log-probabilities of a reference)."""

    build: Lazy[BuildBatchSource]


BATCH_SOURCES = Kind("batch_sources", "a source of batches", BatchSourceSpec, "mt-core")


class BuildCallback(Protocol):
    def __call__(self, config: Any) -> Any:
        """A mt_core.train.Callback, or None where it has nothing to do. config: a mt_core.config.Config."""
        ...


@dataclass(frozen=True, kw_only=True)
class CallbackSpec(Spec):
    """Follows training (`mt_core.train.callbacks.Callback`); on when `train.callbacks` names it, or always."""

    build: Lazy[BuildCallback]
    always: bool = False
    all_ranks: bool = False
    """Whether each rank has one. Others run on rank 0 alone, since they write files or to the terminal."""


_TRACKER_HOMES = {name: f"'mt-ops[{name}]'" for name in ("tensorboard", "wandb", "mlflow", "trackio", "comet")}
"""Which package to install, for messages."""
CALLBACKS = Kind("callbacks", "a callback", CallbackSpec, "mt-core", homes=_TRACKER_HOMES)


class AnswerRunRequest(Protocol):
    def __call__(self, trainer: Any, argument: str, by: str) -> str:
        """The answer, after the request is carried out. trainer: the mt_core.train.Trainer, between two steps.

        Called on all ranks, which do the same and answer the same. Raises MtError where it cannot be carried out: on
        all ranks, and training goes on.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class RunRequestSpec(Spec):
    """Something that a running training can be asked for: `mt ctl RUN NAME ARGUMENT`."""

    answer: Lazy[AnswerRunRequest]


RUN_REQUESTS = Kind("run_requests", "a request to a run", RunRequestSpec, "mt-core", homes={"generate": "mt-infer"})


class BuildEvaluator(Protocol):
    def __call__(self, config: Any) -> Any:
        """config: a mt_core.config.Config. None: the configuration turns on nothing of this evaluator."""
        ...


@dataclass(frozen=True, kw_only=True)
class EvaluatorSpec(Spec):
    """Measures the model during training (`mt_core.train.validation.Evaluator`), on all ranks."""

    build: Lazy[BuildEvaluator]


EVALUATORS = Kind("evaluators", "an evaluator", EvaluatorSpec, "mt-eval")


@dataclass(frozen=True, kw_only=True)
class CommandSpec(Spec):
    """A sub-command of `mt`: a typer app, imported when it is called.

    name: with a space, such as "verify generation", it adds `generation` to the group `verify` of another plugin.
    """

    app: Lazy[Any]


COMMANDS = Kind("commands", "a command", CommandSpec, "mt-cli")


class TransformModel(Protocol):
    def __call__(self, model: torch.nn.Module, config: Any, context: Any) -> torch.nn.Module:
        """The model, changed, or another one in its place. Its parameters have no values yet.

        config: a mt_core.config.Config. context: the mt_core.nn.build_context.ModelBuildContext that it was built with.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ModelTransformSpec(Spec):
    """A change of models after a family has built them and before kernels are chosen, turned on by keys of its own.

    Transforms are applied in the order of their names, wherever a model is built: in training, generation, plans.
    """

    applies: Lazy[Callable[[Any], bool]]
    """(config: mt_core.config.Config) -> whether the configuration turns it on"""
    transform: Lazy[TransformModel]
    adapt: Lazy[Callable[[CheckpointReader, Any, Any], CheckpointReader]] | None = None
    """(reader, config, host) -> the checkpoint that a run starts from (checkpoint.load) under the names and in the form
    of the model after the transform. None: as it is."""
    replaces_parameters: bool = False
    """Parameters that the family declares have no memory before the transforms, which replace the large ones."""


MODEL_TRANSFORMS = Kind("model_transforms", "a model transform", ModelTransformSpec, "mt-core")


class ShrinkSection(Protocol):
    def __call__(self, section: Mapping[str, Any], tree: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        """The keys of the section beside a small model. tree: the sections of the small configuration.

        A section that names a model, a tokenizer or data which only the large configuration fits names others here.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class SectionSpec(Spec):
    """A section of the configuration that a distribution brings: `[name]`, read with `config.section(type)`."""

    config_type: Lazy[type]
    """A subclass of mt_core.config.fields.Section; every key has a default."""
    affects_training: bool = False
    """Whether a run may be resumed with the same values only (or with those that checkpoint.accept_changes names)."""
    shrink: Lazy[ShrinkSection] | None = None
    """For `mt verify layout` and `resume`. None: the small configuration has the section as it is."""


SECTIONS = Kind(
    "sections",
    "a section of the configuration",
    SectionSpec,
    "mt-core",
    homes={
        "inference": "mt-infer",
        "eval": "mt-eval",
        "profile": "mt-tools",
        "adapter": "mt-tune",
        "tune": "mt-tune",
        "preference": "mt-tune",
        "quantize": "mt-tune",
        "score_head": "mt-tune",
        "rewards": "mt-tune",
        "rl": "mt-tune",
        "distillation": "mt-tune",
        **dict.fromkeys(_TRACKER_HOMES, "mt-ops"),
    },
)


class CheckConfig(Protocol):
    def __call__(self, config: Any) -> None:
        """config: a mt_core.config.Config. Raises ConfigError."""
        ...
