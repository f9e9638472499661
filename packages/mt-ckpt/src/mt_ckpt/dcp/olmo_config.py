"""OLMo-core's `config.json`, as the contents of one of Hugging Face's.

It is the configuration of a whole experiment; what the model is stands under `model`. Blocks with norms before
attention and feed-forward are read; a key that is not known here has to be off. The number of positions is the length
of the sequences it was trained with: `train_module.max_sequence_length`, in older files `dataset.sequence_length`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_ckpt.safetensors_files import TensorInfo
from mt_core.errors import ConfigError

WITHOUT_MEANING = {
    "_CLASS_", "type", "dtype", "init_method", "init_seed", "init_std", "embedding_init_std", "freeze_params",
    "backend", "use_flash", "loss_implementation", "dropout", "full_precision", "bias",
}  # fmt: skip
"""Of no consequence to the outputs of a trained model, or told by the tensors."""
BEFORE = "default"
OLMO_2 = "reordered_norm"
ROTARY_BASE = 500_000
Q_NORM, BIAS, OUTPUT_BIAS = (
    f"model.layers.0.self_attn.{name}" for name in ("q_norm.weight", "q_proj.bias", "o_proj.bias")
)


def is_olmo(content: Mapping[str, Any]) -> bool:
    model = content.get("model")
    return isinstance(model, dict) and {"d_model", "n_layers", "block"} <= set(model)


def to_hugging_face(content: Mapping[str, Any], file: Path, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """config.json of the model. tensors: under Hugging Face's names.

    Raises ConfigError for keys that are missing or unknown, and for models that no family is.
    """
    model = _Section(file, "model", content["model"])
    block = model.section("block")
    _require_block(block)
    mixer = block.section("sequence_mixer" if "sequence_mixer" in block.values else "attention")
    norm, rope = block.section("layer_norm"), mixer.section("rope")
    feed_forward, head = block.section("feed_forward"), model.section("lm_head")
    head_norm = head.section("layer_norm")
    heads = mixer.need("n_heads")
    external = {
        "model_type": _model_type(mixer, tensors),
        "hidden_size": model.need("d_model"),
        "num_hidden_layers": model.need("n_layers"),
        "vocab_size": model.need("vocab_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": mixer.get("n_kv_heads", heads),
        "head_dim": mixer.get("head_dim", model.need("d_model") // heads),
        "intermediate_size": feed_forward.need("hidden_size"),
        "rms_norm_eps": norm.need("eps"),
        "rope_theta": rope.get("theta", ROTARY_BASE),
        "max_position_embeddings": _positions(content, file),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }
    for section, known in (
        (model, {"d_model", "n_layers", "vocab_size", "block", "lm_head"}),
        (block, {"sequence_mixer", "attention", "layer_norm", "feed_forward"}),
        (mixer, {"n_heads", "n_kv_heads", "head_dim", "rope", "qk_norm", "use_head_qk_norm"}),
        (feed_forward, {"hidden_size"}),
        (head, {"layer_norm"}),
        (rope, {"theta"}),
    ):
        section.require_off(known)
    for each in (norm, head_norm, *([mixer.section("qk_norm")] if "qk_norm" in mixer.values else [])):
        each.require_norm(norm.need("eps"))
    return external


@dataclass(frozen=True)
class _Section:
    file: Path
    name: str
    all_values: Mapping[str, Any]

    @property
    def values(self) -> dict[str, Any]:
        return {key: value for key, value in self.all_values.items() if value is not None}

    def get(self, key: str, default: Any) -> Any:
        return self.values.get(key, default)

    def need(self, key: str) -> Any:
        if key not in self.values:
            raise ConfigError(f"{self.file}: {self.name}.{key} is missing, which OLMo-core's models have")
        return self.values[key]

    def section(self, key: str) -> _Section:
        value = self.need(key)
        if not isinstance(value, dict):
            raise ConfigError(f"{self.file}: {self.name}.{key}={value!r} is no section of keys")
        return _Section(self.file, f"{self.name}.{key}", value)

    def require_off(self, known: set[str]) -> None:
        """Raises ConfigError for another key that changes what the model computes."""
        names = {BEFORE, "fused"} if self.name.endswith(("attention", "sequence_mixer")) else {BEFORE}
        for key, value in self.values.items():
            if key in known | WITHOUT_MEANING or value is False or (key == "name" and value in names):
                continue
            raise ConfigError(f"{self.file}: {self.name}.{key}={value!r} is not read from OLMo-core's models")

    def require_norm(self, epsilon: float) -> None:
        if self.get("name", "default") not in ("rms", "fused_rms") or self.need("eps") != epsilon:
            raise ConfigError(
                f"{self.file}: {self.name} is {self.get('name', 'default')} with eps={self.need('eps')}; it can be rms "
                f"or fused_rms with that of model.block.layer_norm, {epsilon}"
            )


def _require_block(block: _Section) -> None:
    kind = block.get("name", BEFORE)
    if kind == BEFORE:
        return
    told = f"{block.file}: {block.name}.name={kind}"
    if kind == OLMO_2:
        raise ConfigError(
            f"{told}: OLMo 2 normalizes what attention and feed-forward return and not what they get, and queries and "
            f"keys over all heads together; no installed family has such layers. It can be {BEFORE}"
        )
    raise ConfigError(f"{told} is not read; it can be {BEFORE}, with norms before attention and feed-forward")


def _model_type(mixer: _Section, tensors: Mapping[str, TensorInfo]) -> str:
    if "qk_norm" in mixer.values and not mixer.get("use_head_qk_norm", False):
        raise ConfigError(
            f"{mixer.file}: {mixer.name}.qk_norm without use_head_qk_norm normalizes queries and keys over all heads "
            "together, which no dense family does"
        )
    if Q_NORM in tensors:
        return "qwen3"
    return "qwen2" if BIAS in tensors and OUTPUT_BIAS not in tensors else "llama"


def _positions(content: Mapping[str, Any], file: Path) -> int:
    for section, key in (("train_module", "max_sequence_length"), ("dataset", "sequence_length")):
        values = content.get(section)
        if isinstance(values, dict) and isinstance(values.get(key), int):
            return int(values[key])
    raise ConfigError(f"{file}: has neither train_module.max_sequence_length nor dataset.sequence_length")
