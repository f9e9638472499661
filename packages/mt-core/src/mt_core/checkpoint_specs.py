"""Checkpoint formats: what readers and savers offer, and the specs by which plugins register them.

Readers and savers exchange canonical tensors (names and layouts of docs/reference), so that any format can be
converted into any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from mt_core.kinds import Kind, Lazy, Spec

if TYPE_CHECKING:
    import torch

    from mt_core.tensor_slice import TensorSlice


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
class SupportsFilesFolder(Protocol):
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
    """Multiple that formats with padding pad the vocabulary to. Default: as the model's configuration."""
    vocab_padding: VocabPadding | None = None
    """What the rows of padding are, of formats that store them. Default: those that the source has; others so that a
    softmax over them too gives the loss of the model."""
    dtype: str | None = None
    """Dtype of the written weights: fp32, bf16 or fp16. Default: as they are."""
    quantize: str | None = None
    """Scheme in which the matrices are written, such as fp8-blocks or Q4_K_M. Default: as they are."""
    max_shard_size: int | None = None
    """Bytes of a file, of formats that cut by size."""
    target_megatron_version: str | None = None
    """The Megatron-Core that the files are for, such as 0.12. Default: the newest."""
    target_transformer_impl: Literal["transformer_engine", "local"] | None = None
    """Layers whose names Megatron's formats are written with. Default: the source run's, else Transformer Engine's."""
    target_optimizer_format: Literal["fully_reshardable", "dp_reshardable", "plain", "none"] | None = None
    """Layout of an optimizer's state in Megatron's formats, or that it is left out. Default: plain of a run
    without the distributed optimizer, else fully_reshardable."""
    upcycle_experts: int | None = None
    """Turn the dense feed-forwards into mixtures of so many experts, which compute the same at first."""
    granularity: int = 1
    """Each expert is this much narrower than the dense feed-forward, and as many times more are used."""


@dataclass(frozen=True)
class StrictNames:
    """Names that a strict load expects, all of which are in the files that it reads them from, and no other.

    reader: the program, with its version. number: of names, in all files together.
    """

    reader: str
    number: int


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


class DetectCheckpoint(Protocol):
    def __call__(self, path: Path) -> bool:
        """Whether `path` looks like the format; looks at names of files only."""
        ...


class OpenCheckpoint(Protocol):
    def __call__(self, path: Path, host: Any) -> CheckpointReader:
        """host: the PluginHost, which has the name maps of the families. Raises CheckpointError."""
        ...


class OpenDescribedCheckpoint(Protocol):
    def __call__(self, path: Path, host: Any, *, config: Path | None = None) -> CheckpointReader:
        """config: a file that says what the model is. Raises CheckpointError."""
        ...


class OpenModule(Protocol):
    def __call__(self, module: Any, host: Any) -> CheckpointReader:
        """module: a model in memory whose parameters have the names of the format. host: the PluginHost."""
        ...


CheckStoredConfig = Callable[[Mapping[str, Any]], object]
"""(contents of config.json): raises ConfigError where it says that tensors are stored in a way that is not read."""


@dataclass(frozen=True, kw_only=True)
class CheckpointLoaderSpec(Spec):
    """Reads one checkpoint format."""

    detect: Lazy[DetectCheckpoint]
    open: Lazy[OpenCheckpoint]
    open_described: Lazy[OpenDescribedCheckpoint] | None = None
    """For a format that may not say what the model is; None: its files always do."""
    open_module: Lazy[OpenModule] | None = None
    """None: the format is one of files only."""
    check_config: Lazy[CheckStoredConfig] | None = None
    """None: which ways of storing tensors are read shows where they are opened."""


CHECKPOINT_LOADERS = Kind("checkpoint_loaders", "a checkpoint loader", CheckpointLoaderSpec, "mt-ckpt")


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


CHECKPOINT_SAVERS = Kind("checkpoint_savers", "a checkpoint saver", CheckpointSaverSpec, "mt-ckpt")


class ConvertCheckpoint(Protocol):
    """Writes `source` to `path`. `host` finds the family of `source.metadata["config"]["model"]` and its name maps.

    Raises ConfigError for options and CheckpointError for models that the format cannot express.
    """

    def __call__(self, path: Path, source: CheckpointReader, options: ConvertOptions, host: Any) -> None: ...


class RequireStrictNames(Protocol):
    """Arguments as of ConvertCheckpoint, which wrote `path` from them. Tensors are not read.

    Raises CheckpointError that names what is missing, what is not expected, and what has another shape.
    """

    def __call__(self, path: Path, source: CheckpointReader, options: ConvertOptions, host: Any) -> StrictNames: ...


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
