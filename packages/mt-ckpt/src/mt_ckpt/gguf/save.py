"""Writes a checkpoint as one GGUF file for llama.cpp: names and metadata by the families' declarations, tensors
quantized one at a time."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mt_ckpt.files.checksum import checksum
from mt_ckpt.gguf.block_types import BY_NAME, BlockType
from mt_ckpt.gguf.families import Architecture, family_to_write
from mt_ckpt.gguf.imatrix import Importance, read_imatrix
from mt_ckpt.gguf.mixtures import Model, require_mixture, types_of
from mt_ckpt.gguf.options import GGUFOptions
from mt_ckpt.gguf.quantizers import quantize
from mt_ckpt.gguf.write_file import aligned, encode_header, num_bytes
from mt_ckpt.gguf.write_tokenizer import ends_left_out, tokenizer_metadata
from mt_ckpt.hugging_face.family import family_named
from mt_ckpt.hugging_face.save import Outputs
from mt_ckpt.model import model_config
from mt_ckpt.writing.options import refuse, refuse_layout
from mt_ckpt.writing.output_folders import output_folder
from mt_ckpt.writing.resumable import work_key
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import CheckpointReader, ConvertOptions
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost

QUANTIZATION_VERSION = 2
PREDICTING, PREDICTION = "mtp_num_layers", "mtp."
"""The key of [model] that counts layers of multi-token prediction, and how the names of their parameters begin."""
FILE_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def convert_checkpoint(path: Path, source: CheckpointReader, options: ConvertOptions, host: PluginHost) -> None:
    """Write `<folder>/<folder's name>.gguf`.

    Raises ConfigError for options and models that the format or llama.cpp cannot express, CheckpointError for tensors
    that are not the model's, and OSError. Only the model is written; the format has no place for an optimizer.
    """
    plan = _plan(source, options, host)
    name = f"{path.name.removesuffix('.gguf')}.gguf"
    key = work_key("gguf", getattr(source, "identity", None), {name: list(plan.types)})
    with closing(output_folder(path, key if hasattr(source, "identity") else None, checksums=False)) as folder:
        folder.finish(name, _write(folder.content / name, plan))
        folder.commit({name})


@dataclass(frozen=True)
class _Plan:
    """types: of all tensors, in the order in which they are written. further: tensors that no parameter stands for."""

    metadata: dict[str, Any]
    outputs: Outputs
    further: Mapping[str, Tensor]
    types: dict[str, BlockType]
    importance: Importance

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.further[name].shape if name in self.further else self.outputs.infos[name].shape)

    def values(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.further.items()
        names = list(self.outputs.infos)
        yield from zip(names, self.outputs.values(names), strict=True)


def _plan(source: CheckpointReader, options: ConvertOptions, host: PluginHost) -> _Plan:
    refuse_layout("gguf", options)
    refuse("gguf", options, "max_shard_size", why="it is one file")
    if options.quantize is not None:
        require_mixture(options.quantize)
    model = model_config(source, host).model
    external = family_named(model.family, host).write_config(model)
    family = family_to_write(model.family, host)
    architecture = family.architecture_for(external)
    leaves_prediction = not architecture.predicts and getattr(model, PREDICTING, False)
    if leaves_prediction:
        model = model.model_copy(update={PREDICTING: 0})
        external = family_named(model.family, host).write_config(model)
    values = _model_metadata(architecture, external)
    if leaves_prediction:
        _drop_prediction(source, architecture)
    dropped: Container[str] = getattr(source, "dropped_names", frozenset())
    outputs = Outputs(source, family, model, dropped)  # type: ignore[arg-type]
    if left_out := outputs.left_out():
        source.omit(MODEL + name for name in left_out)  # type: ignore[attr-defined]  # conversions have it
    importance = _importance(options, outputs)
    described = _described(architecture.name, values, bool(importance))
    further = architecture.further(external)
    types = dict.fromkeys(further, BY_NAME["F32"]) | types_of(outputs.infos, options.quantize, described)
    kind = options.quantize or _most_common(outputs)
    head = {
        "general.architecture": architecture.name,
        "general.type": "model",
        "general.file_type": require_mixture(kind).file_type,
        "general.quantization_version": QUANTIZATION_VERSION,
    }
    # A decoder within the configuration of a file with more parts says its vocabulary there.
    vocab_size = external.get("vocab_size", model.vocab_size)
    assert vocab_size is not None
    tokenizer = tokenizer_metadata(source.files(), int(vocab_size))
    if lost := ends_left_out(source.files(), tokenizer, int(vocab_size)):
        source.note(lost)  # type: ignore[attr-defined]  # conversions have it
    return _Plan({**head, **values, **tokenizer}, outputs, further, types, importance)


def _drop_prediction(source: Any, architecture: Architecture) -> None:
    names = [name for name in source.shapes() if name.startswith(MODEL + PREDICTION)]
    source.drop(
        names,
        f"left out, since llama.cpp's {architecture.name} has no multi-token prediction: its {len(names)} tensors; "
        "they change no other output",
    )


def _model_metadata(architecture: Architecture, external: Mapping[str, Any]) -> dict[str, Any]:
    values = {
        key.theirs: key.kind(external[key.ours]) for key in architecture.keys if external.get(key.ours) is not None
    }
    values |= architecture.write(external)
    return {_whole_key(architecture.name, key): value for key, value in values.items()}


def _whole_key(architecture: str, key: str) -> str:
    return key if key.startswith("tokenizer.") else f"{architecture}.{key}"


def _described(name: str, values: Mapping[str, Any], has_importance: bool) -> Model:
    heads, groups = values.get(f"{name}.attention.head_count", 1), values.get(f"{name}.attention.head_count_kv", 1)
    heads, groups = (max(number) if isinstance(number, list) else number for number in (heads, groups))
    return Model(
        layers=values[f"{name}.block_count"],
        experts=values.get(f"{name}.expert_count", 0),
        groups=heads // max(groups, 1),
        has_importance=has_importance,
    )


def _most_common(outputs: Outputs) -> str:
    amounts: dict[str, int] = {}
    for info in outputs.infos.values():
        kind = FILE_TYPES.get(info.dtype, "F32")
        amounts[kind] = amounts.get(kind, 0) + info.num_bytes
    return max(amounts, key=lambda kind: amounts[kind])


def _importance(options: ConvertOptions, outputs: Outputs) -> Importance:
    """Raises ConfigError for a matrix of another model."""
    file = options.importance_matrix if isinstance(options, GGUFOptions) else None
    if file is None:
        return {}
    if options.quantize is None:
        raise ConfigError("--imatrix is used to quantize: give --quantize too, such as Q4_K_M")
    importance = read_imatrix(file)
    unknown = sorted(set(importance) - set(outputs.infos))
    wrong = [n for n, x in importance.items() if n in outputs.infos and x.shape[-1] != outputs.infos[n].shape[-1]]
    if unknown or wrong:
        raise ConfigError(f"--imatrix {file} is of another model: it names {', '.join([*unknown, *wrong][:4])}")
    return importance


# -- the file ----------------------------------------------------------------------------------------


def _write(file: Path, plan: _Plan) -> list[tuple[int, str]]:
    """Sizes and checksums of the parts of the file."""
    header = encode_header(plan.metadata, {name: (plan.shape(name), type_) for name, type_ in plan.types.items()})
    parts = []
    file.unlink(missing_ok=True)  # of a process that was killed
    with file.open("wb") as stream:
        for data in chain([header], _encoded(plan)):
            stream.write(data)
            parts.append((len(data), checksum(data)))
        stream.flush()
        os.fsync(stream.fileno())
    return parts


def _encoded(plan: _Plan) -> Iterator[bytes]:
    for name, tensor in plan.values():
        type_ = plan.types[name]
        data = _quantized(tensor, type_, plan.importance.get(name)).tobytes()
        assert len(data) == num_bytes(plan.shape(name), type_)
        yield data.ljust(aligned(len(data)), b"\0")


def _quantized(tensor: Tensor, type_: BlockType, importance: np.ndarray | None) -> np.ndarray:
    if importance is None or tensor.ndim < 3:
        return quantize(tensor, type_, None if importance is None else importance.reshape(-1))
    # An expert has its own importance.
    parts = [quantize(part, type_, row) for part, row in zip(tensor, importance, strict=True)]
    return np.concatenate(parts)
