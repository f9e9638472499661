"""Where the shape of a DCP folder's model comes from: DCP itself keeps names and shapes of tensors, nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.hugging_face.reader import CONFIG
from mt_ckpt.meta.params import EMBEDDING, GATE, OUTPUT, to_hugging_face
from mt_ckpt.meta.reader import PARAMS
from mt_core.errors import CheckpointError, ConfigError

# -- OLMo-core's `config.json`, as the contents of one of Hugging Face's -----------------------------
#
# It is the configuration of a whole experiment; what the model is stands under `model`. Blocks with norms before
# attention and feed-forward are read; a key that is not known here has to be off. The number of positions is the length
# of the sequences it was trained with: `train_module.max_sequence_length`, in older files `dataset.sequence_length`.

WITHOUT_MEANING = {
    "_CLASS_", "dtype", "init_method", "init_seed", "init_std", "embedding_init_std", "freeze_params", "backend",
    "use_flash", "loss_implementation", "dropout", "full_precision",
}  # fmt: skip
"""Keys of no consequence to what a trained model computes."""
PLAIN: Mapping[str, str] = {"name": "default", "type": "attention", "activation": "silu"}
"""What a kind of a part has to be."""
RMS_NORMS = ("rms", "fused_rms")
OLMO_2 = "reordered_norm"
ROTARY_BASE = 500_000
LENGTHS = (("train_module", "max_sequence_length"), ("dataset", "sequence_length"))


def is_olmo(content: Mapping[str, Any]) -> bool:
    model = content.get("model")
    return isinstance(model, dict) and {"d_model", "n_layers", "block"} <= set(model)


def olmo_to_hugging_face(content: Mapping[str, Any], file: Path, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """config.json of the model. tensors: under Hugging Face's names.

    Raises ConfigError for keys that are missing or unknown, and for models that no family is.
    """
    model = _Section(file, "model", content["model"])
    block, head = model.section("block"), model.section("lm_head")
    _require_norms_before(block)
    feed_forward, norm = block.section("feed_forward"), block.section("layer_norm")
    model.require_known({"d_model", "n_layers", "vocab_size", "block", "lm_head"})
    block.require_known({"sequence_mixer", "attention", "layer_norm", "feed_forward"})
    feed_forward.require_known({"hidden_size"})
    head.require_known({"layer_norm"})
    epsilon = norm.need("eps")
    for each in (norm, head.section("layer_norm")):
        each.require_rms(epsilon)
    return {
        **_attention(block, model.need("d_model"), epsilon),
        "hidden_size": model.need("d_model"),
        "num_hidden_layers": model.need("n_layers"),
        "vocab_size": model.need("vocab_size"),
        "intermediate_size": feed_forward.need("hidden_size"),
        "rms_norm_eps": epsilon,
        "max_position_embeddings": _positions(content, file),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }


@dataclass(frozen=True)
class _Section:
    """Keys under `name`; those without a value are not there."""

    file: Path
    name: str
    stored: Mapping[str, Any]

    @property
    def values(self) -> dict[str, Any]:
        return {key: value for key, value in self.stored.items() if value is not None}

    def need(self, key: str) -> Any:
        if key not in self.values:
            raise ConfigError(f"{self.file}: {self.name}.{key} is missing, which OLMo-core's models have")
        return self.values[key]

    def section(self, key: str) -> _Section:
        value = self.need(key)
        if not isinstance(value, dict):
            raise ConfigError(f"{self.file}: {self.name}.{key}={value!r} is no section of keys")
        return _Section(self.file, f"{self.name}.{key}", value)

    def require_known(self, known: set[str]) -> None:
        """Raises ConfigError for another key that changes what the model computes."""
        for key, value in self.values.items():
            # Options that are off (False, or without a value) change nothing, whatever they are called.
            if key not in known | WITHOUT_MEANING and value is not False and PLAIN.get(key) != value:
                raise ConfigError(f"{self.file}: {self.name}.{key}={value!r} is not read from OLMo-core's models")

    def require_rms(self, epsilon: float) -> None:
        kind, eps = self.values.get("name", "default"), self.need("eps")
        if kind not in RMS_NORMS or eps != epsilon:
            raise ConfigError(
                f"{self.file}: {self.name} is {kind} with eps={eps}; it can be {' or '.join(RMS_NORMS)} with "
                f"{epsilon}, as model.block.layer_norm"
            )


def _require_norms_before(block: _Section) -> None:
    kind = block.values.get("name", PLAIN["name"])
    if kind == OLMO_2:
        raise ConfigError(
            f"{block.file}: {block.name}.name={kind}: OLMo 2 normalizes what attention and feed-forward return and not "
            "what they get, and queries and keys over all heads together; no installed family has such layers. It can "
            f"be {PLAIN['name']}"
        )
    if kind != PLAIN["name"]:
        raise ConfigError(
            f"{block.file}: {block.name}.name={kind} is not read; it can be {PLAIN['name']}, with norms before "
            "attention and feed-forward"
        )


def _attention(block: _Section, hidden: int, epsilon: float) -> dict[str, Any]:
    """Keys of the attention, with the model's type that follows from it."""
    # The name of the section depends on the version of OLMo-core.
    mixer = block.section("sequence_mixer" if "sequence_mixer" in block.values else "attention")
    rope, heads = mixer.section("rope"), mixer.need("n_heads")
    mixer.require_known({"n_heads", "n_kv_heads", "head_dim", "rope", "qk_norm", "use_head_qk_norm"})
    rope.require_known({"theta"})
    normalized = "qk_norm" in mixer.values
    if normalized:
        mixer.section("qk_norm").require_rms(epsilon)
    if normalized and not mixer.values.get("use_head_qk_norm"):
        raise ConfigError(
            f"{mixer.file}: {mixer.name}.qk_norm without use_head_qk_norm normalizes queries and keys over all heads "
            "together, which no dense family does"
        )
    return {
        "model_type": "qwen3" if normalized else "llama",
        "num_attention_heads": heads,
        "num_key_value_heads": mixer.values.get("n_kv_heads", heads),
        "head_dim": mixer.values.get("head_dim", hidden // heads),
        "rope_theta": rope.values.get("theta", ROTARY_BASE),
    }


def _positions(content: Mapping[str, Any], file: Path) -> int:
    for section, key in LENGTHS:
        values = content.get(section)
        if isinstance(values, dict) and isinstance(values.get(key), int):
            return int(values[key])
    raise ConfigError(f"{file}: has neither {' nor '.join(f'{section}.{key}' for section, key in LENGTHS)}")


FLAG = "--config"
OLMO = "OLMo-core's config.json"
META_NAMES = {
    EMBEDDING: "model.embed_tokens.weight",
    OUTPUT: "lm_head.weight",
    GATE: "model.layers.0.mlp.gate_proj.weight",
}
"""What Meta calls the tensors from which params.json is completed."""


def find_config(path: Path, folder: Path, config_file: Path | None) -> Path:
    """The file that says what the model is: the given one, or one in the checkpoint.

    path: the checkpoint as it was named. folder: the one with the index, maybe within it. Raises ConfigError when there
    is none.
    """
    if config_file is not None:
        if not config_file.is_file():
            raise ConfigError(f"{FLAG} {config_file}: no such file")
        return config_file
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
        return olmo_to_hugging_face(content, file, tensors)
    return to_hugging_face(content, {meta: tensors[name] for meta, name in META_NAMES.items() if name in tensors})


def model_type(file: Path) -> str | None:
    """What a config.json of Hugging Face's format says. Raises CheckpointError for a file that is not JSON."""
    content = _read(file)
    return content["model_type"] if _kind(content) == CONFIG else None


def _kind(content: Mapping[str, Any]) -> str | None:
    if isinstance(content.get("model_type"), str):
        return CONFIG
    if is_olmo(content):
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
