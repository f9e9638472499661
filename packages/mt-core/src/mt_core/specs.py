"""What plugins register: one frozen dataclass for each kind of thing, and the interfaces behind them.

A spec is cheap: it names its owner's code by `Lazy("module:attribute")` and imports it only when it is
used, so that listing plugins never imports torch. This module must stay free of heavy imports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch

    from mt_core.tensor_slice import TensorSlice

T = TypeVar("T")
Split = Literal["train", "valid", "test"]


class Lazy(Generic[T]):
    """An object of a plugin's code, imported at the first `load()`.

    Written in code by the plugin's author, as an entry point is; configuration never holds one.
    """

    def __init__(self, reference: str) -> None:
        module, _, attribute = reference.partition(":")
        if not module or not attribute:
            raise ValueError(f'a Lazy reference reads "package.module:attribute", got {reference!r}')
        self.reference = reference

    def load(self) -> T:
        module, _, attribute = self.reference.partition(":")
        return getattr(import_module(module), attribute)

    def __repr__(self) -> str:
        return f"Lazy({self.reference!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lazy) and other.reference == self.reference

    def __hash__(self) -> int:
        return hash(self.reference)


# ---------------------------------------------------------------------------------------------------
# Interfaces of the things that specs build
# ---------------------------------------------------------------------------------------------------


PLAIN_MODULE = "module"
"""The model family of a torch.nn.Module that a program gives; mt-core registers it."""


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Ids with a meaning of their own. One that a tokenizer does not have is None, never a fake number."""

    eod: int | None = None
    """Put after each document."""
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    mask: int | None = None
    cls: int | None = None
    sep: int | None = None
    sentinels: tuple[int, ...] = ()
    """T5's span markers, in the order in which they are used."""


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def vocab_size(self) -> int:
        """The true number of ids, special ones included, without any padding."""
        ...

    @property
    def special(self) -> SpecialTokens: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def fingerprint(self) -> str:
        """A hash of everything that changes the ids; data sets and checkpoints record it."""
        ...

    def files(self) -> Mapping[str, bytes]:
        """The files from which this tokenizer can be built again; they are stored in checkpoints."""
        ...


@runtime_checkable
class HasTokenBytes(Protocol):
    """A tokenizer whose ids stand for fixed bytes, so that generated text can be constrained to a grammar."""

    def token_bytes(self) -> list[bytes | None] | None:
        """Of each id, what it adds to a text; None for special ones and ids without a token. None in place of the list
        where the text of an id depends on its neighbours."""
        ...


class Dataset(Protocol):
    """Samples by number. The order is part of the data set: sample k is the k-th one trained on.

    A method `fingerprint() -> str` may say what the samples are made of, whatever its name and place (not their order,
    which the configuration decides): a run is not resumed on other data unknowingly then.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]: ...

    def describe(self, index: int) -> str:
        """Where sample `index` came from (file, document, offset), for error messages and `mt data where`."""
        ...


@dataclass(frozen=True)
class SplitRequest:
    """What the trainer requests of a data set.

    num_samples is None for all samples of one epoch. sequence_length counts the model's input positions.
    """

    split: Split
    num_samples: int | None
    sequence_length: int
    seed: int


@dataclass(frozen=True)
class SampleField:
    """One array of a sample; shape is in words, for instance "[sequence_length]"."""

    name: str
    dtype: str
    shape: str
    doc: str


CAUSAL_LM_SAMPLE = (
    SampleField("tokens", "int64", "[sequence_length]", "input ids"),
    SampleField("labels", "int64", "[sequence_length]", "the id to predict at each position"),
    SampleField("loss_mask", "float32", "[sequence_length]", "1 where the position counts in the loss, else 0"),
    SampleField("position_ids", "int64", "[sequence_length]", "positions; restart at documents if configured"),
    SampleField(
        "segment_ids",
        "int32",
        "[sequence_length]",
        "number of the document within the sample; positions see only their own. Absent unless "
        "data.reset_attention_mask is set",
    ),
)
"""The arrays of a sample for causal language models: what the dataset of a decoder-only model returns."""


@dataclass(frozen=True)
class AttentionRequest:
    """What a model requires of an attention backend; `supports` answers it before training starts."""

    device_type: str
    dtype: str
    head_dim: int
    num_heads: int
    num_query_groups: int
    causal: bool
    segments: bool
    """Several documents in one sequence that must not see one another."""
    bias: bool
    """A bias added to the scores, such as ALiBi."""
    dropout: float
    deterministic: bool
    window: int | None = None
    logit_softcap: float | None = None
    sinks: bool = False
    """A trained score of each head takes part in the softmax and stands for no key."""


class CheckpointReader(Protocol):
    """An open checkpoint. Names are canonical: `model.<parameter>`, `optimizer.<state>.<parameter>`."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """JSON values: iteration, consumed samples, the resolved config, and what the saver added."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The element type in which each tensor is stored."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """One full tensor on CPU, its checksum verified."""
        ...

    def files(self) -> Mapping[str, bytes]:
        """Small files that are stored too, such as the tokenizer's."""
        ...


@runtime_checkable
class ReadsSlices(Protocol):
    """A `CheckpointReader` that can read parts of a tensor without the rest of it."""

    def read_slices(self, name: str, slices: Sequence[TensorSlice]) -> list[torch.Tensor]:
        """Each slice of the canonical tensor, on CPU; what is read is verified."""
        ...


@runtime_checkable
class KeepsFiles(Protocol):
    """A `CheckpointReader` whose `files` lie in one folder under their names."""

    @property
    def files_folder(self) -> Path: ...


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """A slice of a canonical tensor, as one rank holds it.

    shape: of the whole tensor. tensor: gives the slice's elements, of any device and stride, as they are when it is
    called.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor_slice: TensorSlice
    tensor: Callable[[], torch.Tensor]


VocabPadding = Literal["repeat-last", "mean", "minus-inf-like", "zero"]
"""Rows of the vocabulary that stand for no id, of formats that store them."""


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """What `mt convert` requests of the written checkpoint. A saver refuses what its format cannot express."""

    target_tensor_parallel_size: int = 1
    target_pipeline_parallel_size: int = 1
    target_virtual_pipeline_parallel_size: int = 1
    target_expert_parallel_size: int = 1
    target_expert_tensor_parallel_size: int | None = None
    """Default: as target_tensor_parallel_size."""
    make_vocab_size_divisible_by: int | None = None
    """Of formats that store padding. Default: as the model's configuration."""
    vocab_padding: VocabPadding | None = None
    """What the rows of padding are, of formats that store them. Default: those that the source has; others so that a
    softmax over them too gives the loss of the model."""
    dtype: str | None = None
    """Number format of the written weights: fp32, bf16 or fp16. Default: as they are."""
    max_shard_size: int | None = None
    """Bytes of a file, of formats that cut by size."""
    target_megatron_version: str | None = None
    """The Megatron-Core that the files are for, such as 0.12. Default: the newest."""
    target_transformer_impl: Literal["transformer_engine", "local"] | None = None
    """Of Megatron's formats: whose layers' names are written. Default: the source run's, else Transformer Engine's."""
    target_optimizer_format: Literal["fully_reshardable", "dp_reshardable", "plain", "none"] | None = None
    """Of Megatron's formats: the layout of an optimizer's state, or that it is left out. Default: plain of a run
    without the distributed optimizer, else fully_reshardable."""
    upcycle_experts: int | None = None
    """Turn the dense feed-forwards into mixtures of so many experts, which compute the same at first."""
    granularity: int = 1
    """Each expert is this much narrower than the dense feed-forward, and as many times more are used."""


@runtime_checkable
class MoeDispatcher(Protocol):
    """Moves tokens to the ranks that hold their experts, and the results back."""

    def dispatch(self, tokens: torch.Tensor, routing: Any) -> Any: ...

    def combine(self, expert_output: torch.Tensor, state: Any) -> torch.Tensor: ...


# ---------------------------------------------------------------------------------------------------
# Specs
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A registered thing: `name` is what configuration selects it by, `doc` one line that lists show."""

    name: str
    doc: str
    aliases: tuple[str, ...] = ()
    """Names that it has elsewhere. One that no other spec has, as name or alias, is taken with a note."""


class BuildModel(Protocol):
    def __call__(self, config: Any, environment: Any) -> torch.nn.Module:
        """config: of the spec's config_type. environment: a mt_core.nn.environment.ModelEnvironment."""
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


class AdaptCheckpoint(Protocol):
    def __call__(self, reader: CheckpointReader, config: Any, host: Any) -> CheckpointReader:
        """config: the mt_core.config.Config of the model that starts from it. host: the PluginHost.

        Returns the reader itself for a family that it takes nothing from. Raises ConfigError for a model of the other
        family that computes something else than the parts of this one.
        """
        ...


class CountFlops(Protocol):
    def __call__(self, config: Any) -> float:
        """Floating-point operations of the matrix products of a sample, forward and backward, without recomputation.

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


class CheckpointFiles(Protocol):
    """The files that checkpoints of a run with this [data] section hold, by name.

    files: those of the tokenizer, and those beside them in the checkpoint that the run starts from. Raises ConfigError.
    """

    def __call__(self, config: Any, tokenizer: Tokenizer, files: Mapping[str, bytes]) -> Mapping[str, bytes]: ...


TRAINED_TEMPLATE = "trained_chat_template.jinja"
"""In a checkpoint: the chat template that the model was trained with, where it is not its tokenizer's own. A name of
its own, since a template among the tokenizer's files would change the tokenizer's fingerprint."""


@dataclass(frozen=True, kw_only=True)
class CheckpointLoaderSpec(Spec):
    """Reads one checkpoint format. `detect` looks at file names only; `open` raises CheckpointError."""

    detect: Lazy[Any]
    """(path: Path) -> bool"""
    open: Lazy[Any]
    """(path: Path) -> CheckpointReader. A format whose names need a family's map takes `host: PluginHost` too."""
    takes_host: bool = False
    """Whether `open` is called as (path, host)."""
    open_module: Lazy[Any] | None = None
    """(module: nn.Module, host) -> CheckpointReader of a model in memory whose parameters have the format's names."""
    takes_config: bool = False
    """Whether `open` also takes `config`, a file that says what the model is, since the format may not say it."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaverSpec(Spec):
    """Writes one checkpoint format; `path` appears only when everything in it is on the disk."""

    save: Lazy[SaveCheckpoint] | None = None
    """Saves a run while it trains: one process writes whole tensors."""
    save_sharded: Lazy[type[ShardedSave]] | None = None
    """Saves a run while it trains: every rank writes what it holds; preferred to `save`. A format with neither is
    written by conversion only."""
    convert: Lazy[ConvertCheckpoint] | None = None
    """Writes an open checkpoint in this format, a tensor at a time; None: not a target of conversion."""
    plan: Lazy[PlanFiles] | None = None
    """The files of `convert` in parts that several processes write at the same time; None: one process does."""
    require_strict_names: Lazy[RequireStrictNames] | None = None
    """Compares the names in what `convert` wrote with those that a strict load of the format's program expects. None:
    it has no strict load."""
    takes_file: Lazy[Callable[[str], bool]] | None = None
    """(name) -> whether `convert` writes a file of the source with this name, such as its chat template; None: all."""
    converts_to_addresses: bool = False
    """Whether `convert` takes an address of an object store for its `path`: it writes one file after another."""


class ConvertCheckpoint(Protocol):
    """Writes `source` to `path`. `host` finds the family of `source.metadata["config"]["model"]` and its name maps.

    Raises ConfigError for options and CheckpointError for models that the format cannot express.
    """

    def __call__(self, path: Path, source: CheckpointReader, options: ConvertOptions, host: Any) -> None: ...


@dataclass(frozen=True)
class StrictNames:
    """Names that a strict load expects, all of which are in the files that it reads them from, and no other.

    reader: the program, with its version. number: of names, in all files together.
    """

    reader: str
    number: int


class RequireStrictNames(Protocol):
    """Arguments as of ConvertCheckpoint, which wrote `path` from them. Tensors are not read.

    Raises CheckpointError that names what is missing, what is not expected, and what has another shape.
    """

    def __call__(self, path: Path, source: CheckpointReader, options: ConvertOptions, host: Any) -> StrictNames: ...


@dataclass(frozen=True)
class FilePart:
    """Tensors that follow one another in a file, from `offset` bytes on. names: as the file has them."""

    file: str
    offset: int
    names: tuple[str, ...]


class FilePlan(Protocol):
    """Writes the files of a converted checkpoint part by part, in any process."""

    def write(self, folder: Path, part: FilePart) -> Any:
        """Write a part of a file in `folder`; what is returned is sent to the process that finishes the file."""
        ...


class PlanFiles(Protocol):
    """Arguments as of ConvertCheckpoint. The same source gives the same plan in every process."""

    def __call__(self, source: CheckpointReader, options: ConvertOptions, host: Any) -> FilePlan: ...


class SaveCheckpoint(Protocol):
    def __call__(
        self,
        path: Path,
        tensors: Iterable[tuple[str, torch.Tensor]],
        metadata: Mapping[str, Any],
        files: Mapping[str, bytes],
    ) -> None: ...


class ShardedSave(Protocol):
    """Writes the checkpoints of one run, all ranks together. Made without arguments, on every rank.

    Ranks share a file system or an object store, through which they exchange what they wrote: `write` may run in a
    thread beside training, so that it calls no collectives.
    """

    def begin(self, path: Path) -> str:
        """On the first rank: creates the place of a checkpoint. What it returns is passed to `write` on all ranks."""
        ...

    def write(
        self,
        path: Path,
        place: str,
        rank: int,
        num_ranks: int,
        fragments: Iterable[Fragment],
        metadata: Mapping[str, Any],
        files: Mapping[str, bytes],
    ) -> None:
        """Write this rank's fragments. Returns on the first rank when the whole checkpoint is complete at `path`, on
        the others when their share is on the disk. metadata, files: of the first rank."""
        ...


@dataclass(frozen=True, kw_only=True)
class MoeDispatcherSpec(Spec):
    """Carries tokens between ranks, selected by `model.moe.moe_token_dispatcher_type`."""

    config_type: Lazy[type]
    build: Lazy[Any]
    """(config, placement: mt_moe's ExpertPlacement) -> MoeDispatcher; config checks moe_dispatcher_options"""


@dataclass(frozen=True, kw_only=True)
class FeedForwardSpec(Spec):
    """The block after attention: "dense", "moe", ..."""

    config_type: Lazy[type]
    build: Lazy[Any]
    """(the model's config, environment: ModelEnvironment, layer: int) -> Module

    The module: [batch, sequence, hidden] -> the same. layer: its number in the model, from 0.
    """
    upcycle: Lazy[Any] | None = None
    """Makes this block of dense ones: (reader, host, *, num_experts, granularity) -> CheckpointReader."""


@dataclass(frozen=True, kw_only=True)
class AttentionBackendSpec(Spec):
    """Computes attention, selected by `model.attention_backend`."""

    supports: Lazy[Any]
    """(request: AttentionRequest) -> True, or the reason why not as a string"""
    build: Lazy[Any]
    """(request: AttentionRequest, *, softmax_in_fp32: bool) -> mt_core.nn.attention.AttentionCore"""


@dataclass(frozen=True, kw_only=True)
class PipelineScheduleSpec(Spec):
    """An order of forward and backward passes over pipeline stages, selected by `parallel.pipeline_schedule`."""

    schedule: Lazy[Any]
    """An mt_core.parallel.pipeline.schedules.PipelineSchedule of the same name"""


@dataclass(frozen=True, kw_only=True)
class ContextParallelMethodSpec(Spec):
    """How attention reaches the keys of other ranks of a sequence, selected by `parallel.cp_comm_type`."""

    build: Lazy[Any]
    """(axes: Sequence[Axis], core: AttentionCore) -> AttentionCore

    core: attention of whole sequences on one rank. The result takes q [B, S / CP, N, D], k and v [B, S / CP, G, D] of
    this rank's tokens, in the order of mt_core.nn.context_parallel.shard_sequence. axes: the context-parallel
    axis, or (inner, outer) of a hierarchical method.
    """
    check: Lazy[Any] | None = None
    """(sizes: Sequence[int], heads: int) -> None; raises ConfigError for sizes of the axes, and query heads of a
    tensor-parallel rank, that it cannot serve"""
    hierarchical: bool = False
    """Whether it takes two axes, of the sizes parallel.hierarchical_context_parallel_sizes."""
    whole_sequences: bool = False
    """Whether `core` sees whole sequences, so that what it can compute (a soft cap on scores) is served."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(Spec):
    """An optimizer, selected by `optimizer.optimizer`."""

    config_type: Lazy[type]
    build: Lazy[Any]
    """(config, param_groups) -> mt_core.optim.optimizers.Optimizer, as those of torch.optim are"""
    takes_environment: bool = False
    """Whether `build` is called as (config, param_groups, environment: mt_core.optim.base.OptimizerEnvironment),
    for an optimizer that looks at whole weights."""


@dataclass(frozen=True, kw_only=True)
class LRScheduleSpec(Spec):
    """A learning-rate decay, selected by `lr_schedule.lr_decay_style`."""

    config_type: Lazy[type]
    build: Lazy[Any]
    """(config, horizon: mt_core.optim.schedules.Horizon) -> (consumed samples -> learning rate)"""


@dataclass(frozen=True, kw_only=True)
class LossSpec(Spec):
    """A loss, selected by `train.loss`: per-position losses, which the trainer masks, sums and divides."""

    build: Lazy[Any]
    """(config: Config, parallel: ParallelContext) -> (model_output, batch) -> losses [batch, sequence]"""
    equivalent_to: str | None = None
    """The loss of the same values that this is another implementation of. A run may be resumed with either."""
    in_nats_per_token: bool = False
    """Whether it is the cross entropy of each predicted token, in nats, so that divided by ln 2 it is bits a token."""
    compares_samples: bool = False
    """Whether a sample's loss depends on the others of the micro-batch, on all data-parallel ranks."""
    metrics: Mapping[str, Lazy[Metric]] = field(default_factory=dict)
    """Metrics of the model's outputs, by the name that train.eval_metrics gives them; only of losses [batch]."""


class Metric(Protocol):
    def __call__(self, outputs: np.ndarray, labels: np.ndarray) -> float:
        """outputs: [N, ...] of the model, fp32. labels: [N], of the samples that have one; N may be 0. The higher, the
        better."""
        ...


@dataclass(frozen=True, kw_only=True)
class CallbackSpec(Spec):
    """Follows training (`mt_core.train.callbacks.Callback`); on when `train.callbacks` names it, or always."""

    build: Lazy[Any]
    """(config: Config) -> Callback"""
    always: bool = False


class BuildEvaluator(Protocol):
    def __call__(self, config: Any) -> Any:
        """config: a mt_core.config.Config. None: the configuration turns on nothing of this evaluator."""
        ...


@dataclass(frozen=True, kw_only=True)
class EvaluatorSpec(Spec):
    """Measures the model during training (`mt_core.train.validation.Evaluator`), on all ranks."""

    build: Lazy[BuildEvaluator]


class TextScorer(Protocol):
    """Judges texts, for instance how toxic they are."""

    def scores(self, texts: Sequence[str]) -> list[Mapping[str, float] | None]:
        """For each text attribute -> score from 0 to 1; None for a text that cannot be judged."""
        ...


class BuildTextScorer(Protocol):
    def __call__(self, options: Mapping[str, str], host: Any) -> TextScorer:
        """options: as the user gave them. host: the PluginHost. Raises ConfigError for unknown or missing options."""
        ...


@dataclass(frozen=True, kw_only=True)
class TextScorerSpec(Spec):
    """A judge of texts, selected by --scorer of mt eval."""

    build: Lazy[BuildTextScorer]


class PassageRetriever(Protocol):
    """Finds passages for questions."""

    def passages(self, questions: Sequence[str], k: int) -> list[list[tuple[str, str]]]:
        """For each question the (title, text) of k passages at most, the best first."""
        ...

    def description(self) -> Mapping[str, Any]:
        """JSON values that say what is searched, for results."""
        ...


class BuildPassageRetriever(Protocol):
    def __call__(self, options: Mapping[str, str], device: str) -> PassageRetriever:
        """options: as the user gave them. device: auto, cpu or cuda. Raises ConfigError for unknown or missing
        options."""
        ...


@dataclass(frozen=True, kw_only=True)
class PassageRetrieverSpec(Spec):
    """A search for passages, selected by --retriever of mt eval."""

    build: Lazy[BuildPassageRetriever]


@dataclass(frozen=True, kw_only=True)
class CommandSpec(Spec):
    """A sub-command of `mt`: a typer app, imported when it is called.

    name: with a space, such as "verify generation", it adds `generation` to the group `verify` of another plugin.
    """

    app: Lazy[Any]


class KeyNames(Protocol):
    def __call__(self) -> Mapping[str, Sequence[str]]:
        """Dotted key -> what it is called there."""
        ...


class ExplainName(Protocol):
    def __call__(self, name: str) -> str | None:
        """A sentence about a name that stands for no key; None: there is no such name."""
        ...


@dataclass(frozen=True, kw_only=True)
class KeyNamesSpec(Spec):
    """Names that keys of the configuration have in other software, which `mt config explain` shows and takes."""

    names: Lazy[KeyNames]
    explain: Lazy[ExplainName] | None = None


class CheckConfig(Protocol):
    def __call__(self, config: Any) -> None:
        """config: a mt_core.config.Config. Raises ConfigError."""
        ...
