"""Reads the model of a DCP folder, saved by any number of ranks, a tensor at a time; no pickle is executed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mt_ckpt.dcp.config import external_config, find_config, model_type
from mt_ckpt.dcp.names import PREFIXES, TORCHTITAN, Naming, naming_of
from mt_ckpt.dcp.parts import EXPERT_BIAS, WithParts, is_of_several, require_unused_bias
from mt_ckpt.hugging_face.family import identify
from mt_ckpt.hugging_face.reader import HuggingFaceReader
from mt_ckpt.hugging_face.tensors import ExternalTensors, Renamed
from mt_ckpt.hugging_face.tokenizer import read_tokenizer_files, tokenizer_config
from mt_ckpt.megatron_dist.common import MARK_FILE
from mt_ckpt.megatron_dist.index import METADATA_FILE, ChunkedTensor, Index, read_index
from mt_ckpt.meta.reader import HalvesRotated
from mt_ckpt.safetensors_files import TensorInfo
from mt_core.errors import CheckpointError
from mt_core.plugins import PluginHost

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
    return _reader(path, _Found(file, index, prefix, naming), host)


@dataclass(frozen=True)
class _Found:
    """How a folder is understood: the file with the configuration, whose names the tensors have after which prefix.

    naming: None for Hugging Face's own names.
    """

    config: Path
    index: Index
    prefix: str
    naming: Naming | None = None


def _with_their_names(path: Path, index: Index, file: Path, host: PluginHost) -> HuggingFaceReader:
    """Of tensors under Hugging Face's names, after whichever prefix lets them be the model's."""
    problems: list[CheckpointError] = []
    # The empty prefix last: it is before every key, and would take the others as parts of names.
    for prefix in reversed(PREFIXES):
        if any(key.startswith(prefix) for key in index.tensors):
            try:
                return _reader(path, _Found(file, index, prefix), host)
            except CheckpointError as error:
                problems.append(error)
    raise CheckpointError(
        f"{path}: its tensors have neither the names of torchtitan nor of OLMo-core, and those of Hugging Face do not "
        f"fit {file}: {problems[-1] if problems else 'there are no tensors'}"
    )


def _reader(path: Path, found: _Found, host: PluginHost) -> HuggingFaceReader:
    tensors, external = _tensors(found)
    family, config = identify(external, tensors.infos, host)
    beside = found.config.parent
    files = read_tokenizer_files(beside, external)
    # torchtitan and OLMo-core name their folders step-N and stepN; the number is in no file that is read.
    step = STEP.fullmatch(path.name)
    metadata = {
        "iteration": int(step[1]) if step else 0,
        READ_FROM: {
            "config": str(found.config),
            "names": found.naming.program if found.naming else "Hugging Face",
            "left_out": _left_out(found),
        },
        "config": {
            "model": config.model.model_dump(mode="json"),
            "tokenizer": tokenizer_config(beside, files, config.model.vocab_size),
        },
    }
    return HuggingFaceReader(tensors, family, config.model, metadata, files)


def _tensors(found: _Found) -> tuple[ExternalTensors, dict[str, Any]]:
    """Under Hugging Face's names and in its order of rows, with what config.json says."""
    stored, naming = _Prefixed(found.index, found.prefix), found.naming
    if naming is None:
        return stored, external_config(found.config, stored.infos)
    kind = model_type(found.config)
    names = {naming.renamed(name, kind): name for name in _whole(stored, naming, kind)}
    # The configuration may depend on tensors (whether there is an LM head), so that names come first.
    renamed = Renamed(stored, names)
    external = external_config(found.config, renamed.infos)
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


def _left_out(found: _Found) -> list[str]:
    """What the folder holds beside the model, by the first parts of the keys."""
    model = {key for key in found.index.tensors if key.startswith(found.prefix) and not _is_of_the_trainer(key)}
    return sorted({key.partition(".")[0] for key in (*found.index.tensors, *found.index.objects) if key not in model})


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
