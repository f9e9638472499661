"""Reads the model of a DCP folder, saved by any number of ranks, a tensor at a time; no pickle is executed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from mt_ckpt.dcp.config import external_config, find_config, model_type
from mt_ckpt.dcp.names import PREFIXES, TORCHTITAN, Naming, naming_of
from mt_ckpt.files.external_tensors import ExternalTensors
from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.hugging_face.family import identify
from mt_ckpt.hugging_face.reader import HuggingFaceReader
from mt_ckpt.hugging_face.tensors import Renamed
from mt_ckpt.hugging_face.tokenizer import read_tokenizer_files, tokenizer_config
from mt_ckpt.megatron_dist.index import MARK_FILE, METADATA_FILE, ChunkedTensor, Index, read_index
from mt_ckpt.meta.reader import HalvesRotated
from mt_core.errors import CheckpointError
from mt_core.plugins import PluginHost

# -- fused tensors of torchtitan: queries, keys and values; stacked experts --------------------------

FUSED = re.compile(r"layers\.(\d+)\.attention\.qkv_linear\.wqkv\.weight")
"""[key-value heads * (queries of one + 2) * D, hidden]: of each key-value head its queries, then the key, the value."""
EXPERTS = re.compile(r"layers\.(\d+)\.moe\.experts\.(w[123])(?:_EFD|_EDF)?")
"""w1 and w3: [experts, width, hidden], w2: [experts, hidden, width]."""
EXPERT_BIAS = re.compile(r"layers\.\d+\.moe\.expert_bias(?:_E)?")
WITH_EXPERTS = ("qwen3_moe", "deepseek_v3")
"""Model types whose experts torchtitan stacks so and Hugging Face names one by one."""
EXPERT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class StoredTensors(ExternalTensors, Protocol):
    def read_first(self, name: str, first: int) -> Tensor:
        """Element `first` of the leading dimension."""
        ...


@dataclass(frozen=True)
class _Part:
    shape: tuple[int, ...]
    stored: str
    read: Callable[[], Tensor]


class WithParts:
    """Tensors under Hugging Face's names, together with the parts of those that hold several (an ExternalTensors)."""

    def __init__(self, whole: ExternalTensors, stored: StoredTensors, external: Mapping[str, Any]) -> None:
        self._whole = whole
        self._parts = dict(_parts(stored, external))
        parts = {name: TensorInfo(part.shape, stored.infos[part.stored].dtype) for name, part in self._parts.items()}
        if twice := sorted(parts.keys() & whole.infos.keys()):
            raise CheckpointError(
                f"tensor {self._parts[twice[0]].stored} holds {twice[0]}, which is also there by itself"
            )
        self.infos: Mapping[str, TensorInfo] = {**whole.infos, **parts}

    def read(self, name: str) -> Tensor:
        return self._parts[name].read() if name in self._parts else self._whole.read(name)


def is_of_several(name: str, model_type: str | None) -> bool:
    """Whether a tensor holds several, in models of this type."""
    with_experts = model_type in WITH_EXPERTS and EXPERTS.fullmatch(name) is not None
    return with_experts or FUSED.fullmatch(name) is not None


def require_unused_bias(stored: StoredTensors, name: str) -> None:
    """Raises CheckpointError for a bias by which the router chooses experts, of a model that has no place for it."""
    if stored.read(name).any():
        raise CheckpointError(
            f"tensor {name} is not zero: the router was trained with a bias on its choice of experts, which models of "
            "this model_type do not have"
        )


def _parts(stored: StoredTensors, external: Mapping[str, Any]) -> Iterator[tuple[str, _Part]]:
    for name, info in stored.infos.items():
        if match := FUSED.fullmatch(name):
            yield from _of_attention(stored, name, f"model.layers.{match[1]}.self_attn", external)
        elif match := EXPERTS.fullmatch(name):
            if len(info.shape) != 3:
                raise CheckpointError(f"tensor {name} has shape {list(info.shape)}, not [experts, rows, columns]")
            for expert in range(info.shape[0]):
                expert_weight = f"model.layers.{match[1]}.mlp.experts.{expert}.{EXPERT_NAMES[match[2]]}.weight"
                yield expert_weight, _Part(info.shape[1:], name, partial(stored.read_first, name, expert))


def _of_attention(
    stored: StoredTensors, name: str, module: str, external: Mapping[str, Any]
) -> Iterator[tuple[str, _Part]]:
    heads = int(external["num_attention_heads"])
    groups = int(external.get("num_key_value_heads") or heads)
    rows, hidden = stored.infos[name].shape
    if heads % groups or rows % (heads + 2 * groups):
        raise CheckpointError(
            f"tensor {name} has {rows} rows, which are not {heads} heads of queries and {groups} of keys and of values"
        )
    # Queries of one key-value head; elements of a head.
    of_one, size = heads // groups, rows // (heads + 2 * groups)
    kinds = {"q_proj": slice(0, of_one), "k_proj": slice(of_one, of_one + 1), "v_proj": slice(of_one + 1, of_one + 2)}
    for kind, taken in kinds.items():
        count = groups * (taken.stop - taken.start)
        read = partial(_heads, stored, name, groups, size, taken)
        yield f"{module}.{kind}.weight", _Part((count * size, hidden), name, read)


def _heads(stored: StoredTensors, name: str, groups: int, size: int, taken: slice) -> Tensor:
    # [groups, of_one + 2, size, hidden] -> [groups * taken, size, hidden] -> [groups * taken * size, hidden]
    return stored.read(name).unflatten(0, (groups, -1, size))[:, taken].flatten(0, 2).contiguous()


MODEL_AND_OPTIMIZER = "model_and_optim"
"""The folder within one of OLMo-core's checkpoints."""
READ_FROM = "read_from"
"""Key of the metadata that says how the folder was understood."""
STEP = re.compile(r"step-?([0-9]+)")


def detect(path: Path) -> bool:
    """Whether `path` holds an index of DCP that is not Megatron's."""
    return _folder_of(path) is not None


def open_checkpoint(path: Path, host: PluginHost, config: Path | None = None) -> HuggingFaceReader:
    """The model in the folder `path`, or in `path`/model_and_optim.

    config: a config.json or params.json that says what the model is; None: the one in the folder. Raises
    CheckpointError for files that are missing or damaged and tensors that are not those of the configuration,
    ConfigError for a configuration that is missing or that no installed family can be built from.
    """
    folder = _folder_of(path)
    if folder is None:
        raise CheckpointError(f"{path}: has no {METADATA_FILE}: no checkpoint of torch.distributed.checkpoint")
    index, file = read_index(folder), find_config(path, folder, config)
    known = naming_of(index.tensors)
    if known is None:
        return _with_their_names(path, index, file, host)
    naming, prefix = known
    return _reader(path, _Checkpoint(file, index, prefix, naming), host)


@dataclass(frozen=True)
class _Checkpoint:
    """How a folder is understood: the file with the configuration, whose names the tensors have after which prefix.

    naming: None for Hugging Face's own names.
    """

    config: Path
    index: Index
    prefix: str
    naming: Naming | None = None


def _with_their_names(path: Path, index: Index, file: Path, host: PluginHost) -> HuggingFaceReader:
    """The family of tensors under Hugging Face's names, after whichever prefix lets them be the model's."""
    problems: list[CheckpointError] = []
    # The empty prefix last: it is before every key, and would take the others as parts of names.
    for prefix in reversed(PREFIXES):
        if any(key.startswith(prefix) for key in index.tensors):
            try:
                return _reader(path, _Checkpoint(file, index, prefix), host)
            except CheckpointError as error:
                problems.append(error)
    raise CheckpointError(
        f"{path}: its tensors have neither the names of torchtitan nor of OLMo-core, and those of Hugging Face do not "
        f"fit {file}: {problems[-1] if problems else 'there are no tensors'}"
    )


def _reader(path: Path, checkpoint: _Checkpoint, host: PluginHost) -> HuggingFaceReader:
    tensors, external = _tensors(checkpoint)
    family, config = identify(external, tensors.infos, host)
    beside = checkpoint.config.parent
    files = read_tokenizer_files(beside, external)
    # torchtitan and OLMo-core name their folders step-N and stepN; the number is in no file that is read.
    step = STEP.fullmatch(path.name)
    metadata = {
        "iteration": int(step[1]) if step else 0,
        READ_FROM: {
            "config": str(checkpoint.config),
            "names": checkpoint.naming.program if checkpoint.naming else "Hugging Face",
            "left_out": _left_out(checkpoint),
        },
        "config": {
            "model": config.model.model_dump(mode="json"),
            "tokenizer": tokenizer_config(beside, files, config.model.vocab_size),
        },
    }
    return HuggingFaceReader(tensors, family, config.model, metadata, files)


def _tensors(checkpoint: _Checkpoint) -> tuple[ExternalTensors, dict[str, Any]]:
    """Under Hugging Face's names and in its order of rows, with what config.json says."""
    stored, naming = _Prefixed(checkpoint.index, checkpoint.prefix), checkpoint.naming
    if naming is None:
        return stored, external_config(checkpoint.config, stored.infos)
    kind = model_type(checkpoint.config)
    names = {naming.renamed(name, kind): name for name in _whole(stored, naming, kind)}
    # The configuration may depend on tensors (whether there is an LM head), so that names come first.
    renamed = Renamed(stored, names)
    external = external_config(checkpoint.config, renamed.infos)
    tensors = WithParts(renamed, stored, external) if naming is TORCHTITAN else renamed
    if external["model_type"] in naming.halves_rotated:
        return tensors, external
    # Rows of queries and keys for rotating neighbours (Meta's order) become those for rotating halves.
    return HalvesRotated(tensors, external), external


def _whole(stored: _Prefixed, naming: Naming, kind: str | None) -> Iterator[str]:
    """Names of the tensors that are one of Hugging Face's each."""
    for name in stored.infos:
        if name in naming.ignored or (naming is TORCHTITAN and is_of_several(name, kind)):
            continue
        # torchtitan keeps the bias of every MoE; Qwen 3 has none, so that a bias of zeros is left out.
        if EXPERT_BIAS.fullmatch(name) and kind == "qwen3_moe":
            require_unused_bias(stored, name)
            continue
        yield name


def _left_out(checkpoint: _Checkpoint) -> list[str]:
    """What the folder holds beside the model, by the first parts of the keys."""
    model = {
        key for key in checkpoint.index.tensors if key.startswith(checkpoint.prefix) and not _is_of_the_trainer(key)
    }
    return sorted(
        {key.partition(".")[0] for key in (*checkpoint.index.tensors, *checkpoint.index.objects) if key not in model}
    )


class _Prefixed:
    """The tensors whose keys begin with a prefix, without it (an ExternalTensors).

    Without a prefix those of the trainer's own states are left out.
    """

    def __init__(self, index: Index, prefix: str) -> None:
        self._tensors = {
            key.removeprefix(prefix): tensor
            for key, tensor in index.tensors.items()
            if key.startswith(prefix) and not _is_of_the_trainer(key)
        }
        self.infos: Mapping[str, TensorInfo] = {name: _info(tensor) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name].read()

    def read_first(self, name: str, first: int) -> Tensor:
        """Element `first` of the leading dimension; only chunks that have some of it are read."""
        _, *rest = self._tensors[name].shape
        return self._tensors[name].read_slice((first, *(0 for _ in rest)), (first + 1, *rest))[0]


OF_THE_TRAINER = {"optimizer", "optim", "lr_scheduler", "dataloader", "train_state"}
"""First parts of keys that no model has."""


def _is_of_the_trainer(key: str) -> bool:
    return key.partition(".")[0] in OF_THE_TRAINER


def _info(tensor: ChunkedTensor) -> TensorInfo:
    return TensorInfo(tuple(tensor.shape), tensor.dtype)


def _folder_of(path: Path) -> Path | None:
    """The folder with the index."""
    for folder in (path, path / MODEL_AND_OPTIMIZER):
        # An index with a mark beside it is Megatron's torch_dist.
        if (folder / METADATA_FILE).is_file() and not (folder / MARK_FILE).is_file():
            return folder
    return None
