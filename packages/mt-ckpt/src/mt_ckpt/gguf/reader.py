"""Reads the models of a GGUF file: Llama and its relatives, Qwen 2 and 3."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.gguf.file import GGUFFile
from mt_ckpt.gguf.tokenizer import T, tokenizer_files, value_of
from mt_ckpt.hugging_face.family import identify
from mt_ckpt.hugging_face.reader import HuggingFaceReader
from mt_ckpt.hugging_face.tokenizer import tokenizer_config
from mt_ckpt.meta.reader import neighbours_to_halves
from mt_core.config_map import require_known
from mt_core.errors import CheckpointError, ConfigError
from mt_core.plugins import PluginHost

ARCHITECTURES = ("llama", "qwen2", "qwen3")
NEIGHBOURS_ROTATED = ("llama",)
"""Architectures of which llama.cpp has put the rows of queries and keys in the order for rotating neighbours."""
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FREQUENCY_FACTORS = "rope_freqs.weight"
ROPE_BASE = 10000.0
"""Where the file has no rope.freq_base."""


def detect(path: Path) -> bool:
    """Whether `path` is a .gguf file, or a directory that holds exactly one."""
    return _file_at(path) is not None


def open_checkpoint(path: Path, host: PluginHost) -> HuggingFaceReader:
    """Raises CheckpointError for a file that is damaged or whose tensors do not fit, ConfigError for a model that
    is none of ARCHITECTURES."""
    file = _file_at(path)
    if file is None:
        raise CheckpointError(f"{path}: neither a .gguf file nor a directory with exactly one")
    stored = GGUFFile(file)
    values = stored.metadata
    architecture = require_known("general.architecture", str(values.get("general.architecture")), ARCHITECTURES)
    external = _config(architecture, values, stored)
    tensors = _Renamed(stored, architecture, external)
    family, config = identify(external, tensors.infos, host)
    files = tokenizer_files(values)
    metadata = {
        "iteration": 0,
        "config": {
            "model": config.model.model_dump(mode="json"),
            "tokenizer": tokenizer_config(file.parent, files, config.model.vocab_size),
        },
    }
    return HuggingFaceReader(tensors, family, config.model, metadata, files)


class _Renamed:
    """The file's tensors under Hugging Face's names and in its order of rows (an ExternalTensors)."""

    def __init__(self, file: GGUFFile, architecture: str, external: Mapping[str, Any]) -> None:
        self._file = file
        self._stored = {_renamed(name): name for name in file.tensors if name != FREQUENCY_FACTORS}
        self.infos: Mapping[str, TensorInfo] = {new: file.tensors[old] for new, old in self._stored.items()}
        heads = {"q_proj": external["num_attention_heads"], "k_proj": external["num_key_value_heads"]}
        self._heads = heads if architecture in NEIGHBOURS_ROTATED else {}

    def read(self, name: str) -> Tensor:
        tensor = self._file.read(self._stored[name])
        # [-2]: the module, such as q_proj; biases of queries and keys are in that order too.
        heads = self._heads.get(name.split(".")[-2])
        return tensor if heads is None else neighbours_to_halves(tensor, heads)


def _renamed(name: str) -> str:
    match = re.fullmatch(r"blk\.([0-9]+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in IN_LAYER:
        return f"model.layers.{match[1]}.{IN_LAYER[match[2]]}.{match[3]}"
    if name not in TOP:
        raise CheckpointError(f"tensor {name} is not one of those that {' and '.join(ARCHITECTURES)} have")
    return TOP[name]


def _file_at(path: Path) -> Path | None:
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    # Of several files nothing says which is meant (a model in parts, or quantized in several ways).
    found = list(path.glob("*.gguf"))
    return found[0] if len(found) == 1 else None


# -- configuration ----------------------------------------------------------------------------------


def _config(architecture: str, values: Mapping[str, Any], file: GGUFFile) -> dict[str, Any]:
    """The contents of a config.json."""
    read = _Values(architecture, values)
    hidden, heads = read.size("embedding_length"), read.size("attention.head_count")
    head_dim = read.get("attention.key_length", int) or hidden // heads
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError("tensor token_embd.weight is missing in the checkpoint")
    return {
        "model_type": architecture,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": read.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.get("attention.head_count_kv", int) or heads,
        "head_dim": head_dim,
        "intermediate_size": read.size("feed_forward_length"),
        "max_position_embeddings": read.size("context_length"),
        "rms_norm_eps": _shortest(read.need("attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(_rope_base(read)),
        "rope_scaling": _scaling(read, file, head_dim),
        # llama.cpp leaves the LM head out where it is tied to the embedding.
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **({"attention_bias": "blk.0.attn_q.bias" in file.tensors} if architecture == "llama" else {}),
    }


class _Values:
    """Metadata under `<architecture>.`."""

    def __init__(self, architecture: str, values: Mapping[str, Any]) -> None:
        self.architecture, self._values = architecture, values

    def get(self, key: str, kind: type[T]) -> T | None:
        return value_of(self._values, f"{self.architecture}.{key}", kind)

    def need(self, key: str, kind: type[T]) -> T:
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(f"the file has no {self.architecture}.{key}")
        return value

    def size(self, key: str) -> int:
        value = self.need(key, int)
        if value < 1:
            raise CheckpointError(f"{self.architecture}.{key} is {value}; it has to be 1 or more")
        return value


def _rope_base(read: _Values) -> float:
    base = read.get("rope.freq_base", float)
    return ROPE_BASE if base is None else base


def _shortest(value: float) -> float:
    """The number that somebody wrote and the file holds in 32 bits: 1e-05, not 9.999999747378752e-06."""
    return next(x for digits in range(1, 18) if _single(x := float(f"{value:.{digits}g}")) == _single(value))


def _single(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def _scaling(read: _Values, file: GGUFFile, head_dim: int) -> dict[str, Any] | None:
    kind = read.get("rope.scaling.type", str) or "none"
    # Before the type: llama.cpp writes "none", or nothing, beside the factors of Llama 3.
    if FREQUENCY_FACTORS in file.tensors:
        return _llama3_scaling(read, file.read(FREQUENCY_FACTORS), head_dim)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(read.need("rope.scaling.factor", float))}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": float(read.need("rope.scaling.factor", float))}
        return {**scaling, "original_max_position_embeddings": read.need("rope.scaling.original_context_length", int)}
    raise ConfigError(
        f"{read.architecture}.rope.scaling.type={kind!r} is not supported; it can be none, linear or yarn"
    )


def _llama3_scaling(read: _Values, factors: Tensor, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, of which llama.cpp stores what each frequency is divided by.

    Raises ConfigError unless the published parameters give exactly these numbers.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = _llama3_factors(scaling, _rope_base(read), head_dim)
    if expected.shape != factors.shape or not torch.allclose(expected, factors, rtol=1e-4):
        raise ConfigError(f"{FREQUENCY_FACTORS} holds factors that are not those of Llama 3 with {scaling}")
    return scaling


def _llama3_factors(scaling: Mapping[str, Any], base: float, head_dim: int) -> Tensor:
    """What each of the head_dim / 2 frequencies is divided by (The Llama 3 Herd of Models, 2024)."""
    factors = []
    low, high, factor = (scaling[key] for key in ("low_freq_factor", "high_freq_factor", "factor"))
    for channel in range(0, head_dim, 2):
        # Rotations of the channel within the original context: below low_freq_factor it is scaled wholly, above
        # high_freq_factor not, between them in part.
        turns = scaling["original_max_position_embeddings"] / (2 * math.pi * base ** (channel / head_dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(factors)
