"""Where the shape of a DCP folder's model comes from: DCP itself keeps names and shapes of tensors, nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mt_ckpt.dcp import olmo_config
from mt_ckpt.hugging_face.reader import CONFIG
from mt_ckpt.meta.params import EMBEDDING, GATE, OUTPUT, to_hugging_face
from mt_ckpt.meta.reader import PARAMS
from mt_ckpt.safetensors_files import TensorInfo
from mt_core.errors import CheckpointError, ConfigError

FLAG = "--config"
OLMO = "OLMo-core's config.json"
META_NAMES = {
    EMBEDDING: "model.embed_tokens.weight",
    OUTPUT: "lm_head.weight",
    GATE: "model.layers.0.mlp.gate_proj.weight",
}
"""What Meta calls the tensors from which params.json is completed."""


def find_config(path: Path, folder: Path, given: Path | None) -> Path:
    """The file that says what the model is: the given one, or one in the checkpoint.

    path: the checkpoint as it was named. folder: the one with the index, maybe within it. Raises ConfigError when there
    is none.
    """
    if given is not None:
        if not given.is_file():
            raise ConfigError(f"{FLAG} {given}: no such file")
        return given
    # Both may be one folder; OLMo-core's config.json is in the outer one, its index in the inner.
    for place in dict.fromkeys((folder, path)):
        for name in (CONFIG, PARAMS):
            if (place / name).is_file() and _kind(_read(place / name)) is not None:
                return place / name
    raise ConfigError(
        f"{path}: a checkpoint of torch.distributed.checkpoint holds tensors and does not say what its model is; give "
        f"{FLAG} FILE, a config.json of Hugging Face's format or OLMo-core's or a params.json of Meta's, or put that "
        "file beside them"
    )


def external_config(file: Path, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The contents of a config.json; tensors: under Hugging Face's names.

    Raises ConfigError for a file of another kind and for unknown parameters, CheckpointError for one that is not JSON.
    """
    content = _read(file)
    kind = _kind(content)
    if kind is None:
        raise ConfigError(
            f"{file}: neither a config.json of Hugging Face's format (which has model_type) nor of OLMo-core's "
            "(model.d_model, model.n_layers and model.block) nor a params.json of Meta's (dim and n_layers)"
        )
    if kind == CONFIG:
        return content
    if kind == OLMO:
        return olmo_config.to_hugging_face(content, file, tensors)
    return to_hugging_face(content, {meta: tensors[name] for meta, name in META_NAMES.items() if name in tensors})


def model_type(file: Path) -> str | None:
    """What a config.json of Hugging Face's format says. Raises CheckpointError for a file that is not JSON."""
    content = _read(file)
    return content["model_type"] if _kind(content) == CONFIG else None


def _kind(content: Mapping[str, Any]) -> str | None:
    if isinstance(content.get("model_type"), str):
        return CONFIG
    if olmo_config.is_olmo(content):
        return OLMO
    return PARAMS if {"dim", "n_layers"} <= set(content) else None


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return content
