"""Reads the models of a GGUF file: tensors by the declarations of the model families, dequantized one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.gguf.families import Architecture, family_of_file
from mt_ckpt.gguf.metadata import ArchitectureMetadata
from mt_ckpt.gguf.split_files import GGUFTensors, file_at, open_files
from mt_ckpt.gguf.tokenizer import tokenizer_files
from mt_ckpt.hugging_face.family import check_layers, family_named, read_config
from mt_ckpt.hugging_face.reader import HuggingFaceReader
from mt_ckpt.hugging_face.tokenizer import tokenizer_config
from mt_core.errors import CheckpointError
from mt_core.plugins import PluginHost


def detect(path: Path) -> bool:
    """Whether `path` is a .gguf file, or a directory that holds exactly one model, perhaps in several."""
    return file_at(path) is not None


def open_checkpoint(path: Path, host: PluginHost) -> HuggingFaceReader:
    """Raises CheckpointError for a file that is damaged or whose tensors do not fit, ConfigError for a model of an
    architecture that no installed family has."""
    file = file_at(path)
    if file is None:
        raise CheckpointError(f"{path}: neither a .gguf file nor a directory with exactly one, or one model in parts")
    stored = open_files(file)
    metadata = ArchitectureMetadata(str(stored.metadata.get("general.architecture")), stored)
    family, architecture = family_of_file(metadata, host)
    external = read_external(metadata, architecture)
    check_layers(external, len(stored.tensors))
    config = read_config(family_named(family.family, host), external, host)
    files = tokenizer_files(stored.metadata, config.model.vocab_size)
    sections = {
        "model": config.model.model_dump(mode="json"),
        "tokenizer": tokenizer_config(file.parent, files, config.model.vocab_size),
    }
    tensors = _Tensors(stored)
    return HuggingFaceReader(tensors, family, config.model, {"iteration": 0, "config": sections}, files)  # type: ignore[arg-type]


def read_external(metadata: ArchitectureMetadata, architecture: Architecture) -> dict[str, Any]:
    """The contents of a config.json."""
    config: dict[str, Any] = {"model_type": architecture.model_type}
    for key in architecture.keys:
        value = metadata.get(key.theirs, key.kind) if key.default is not None else _needed(metadata, key)
        config[key.ours] = key.default if value is None else value
    return {**config, **architecture.read(metadata)}


def _needed(metadata: ArchitectureMetadata, key: Any) -> Any:
    # Whole numbers are sizes and numbers of layers, heads and experts.
    return metadata.size(key.theirs) if key.kind is int else metadata.need(key.theirs, key.kind)


class _Tensors:
    """The file's tensors (an ExternalTensors)."""

    def __init__(self, file: GGUFTensors) -> None:
        self._file = file
        self.infos: Mapping[str, TensorInfo] = file.tensors

    def read(self, name: str) -> Tensor:
        return self._file.read(name)
