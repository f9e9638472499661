"""`params.json` of Meta's Llama and of Mistral's own layout, as the contents of a config.json, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_ckpt.files.safetensors import TensorInfo
from mt_core.errors import CheckpointError, ConfigError

NEEDED = ("dim", "n_layers", "n_heads", "norm_eps")
OF_META = {
    "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "rope_theta", "use_scaled_rope",
    "rope_scaling_factor", "max_seq_len", "max_batch_size",
}  # fmt: skip
OF_MISTRAL = {
    "n_kv_heads", "vocab_size", "head_dim", "hidden_dim", "rope_theta", "sliding_window", "max_seq_len",
    "max_position_embeddings", "model_type", "tied_embeddings", "max_batch_size",
}  # fmt: skip
EMBEDDING, OUTPUT, GATE = "tok_embeddings.weight", "output.weight", "layers.0.feed_forward.w1.weight"
LLAMA_3_BASE = 500000.0


def to_hugging_face(params: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """config.json of the model. Widths that params.json leaves to code are taken from the tensors' shapes.

    Raises ConfigError for parameters that are missing or unknown, CheckpointError for missing tensors.
    """
    # The same file name, but Mistral gives the inner width and Meta computes it.
    mistral = "hidden_dim" in params
    known = {*NEEDED, *(OF_MISTRAL if mistral else OF_META)}
    if missing := [key for key in NEEDED if key not in params]:
        raise ConfigError(f"params.json: {', '.join(missing)} is missing")
    if unknown := sorted(set(params) - known):
        settings = ", ".join(f"{key}={params[key]!r}" for key in unknown)
        raise ConfigError(f"params.json: {settings} is not known; known are {', '.join(sorted(known))}")
    for name in (EMBEDDING, GATE):
        if name not in tensors:
            raise CheckpointError(f"tensor {name} is missing in the checkpoint")
    return {**_common(params, tensors), **(_mistral(params) if mistral else _llama(params))}


def _common(params: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    vocab_size = tensors[EMBEDDING].shape[0]
    # Meta writes -1 where the tokenizer gives the number.
    if params.get("vocab_size", -1) not in (-1, vocab_size):
        raise CheckpointError(f"params.json: vocab_size={params['vocab_size']}, but {EMBEDDING} has {vocab_size} rows")
    return {
        "vocab_size": vocab_size,
        "hidden_size": params["dim"],
        "num_hidden_layers": params["n_layers"],
        "num_attention_heads": params["n_heads"],
        "num_key_value_heads": params.get("n_kv_heads") or params["n_heads"],
        "head_dim": params.get("head_dim") or params["dim"] // params["n_heads"],
        "intermediate_size": tensors[GATE].shape[0],
        "rms_norm_eps": params["norm_eps"],
        "tie_word_embeddings": OUTPUT not in tensors,
    }


def _mistral(params: Mapping[str, Any]) -> dict[str, Any]:
    window = params.get("sliding_window")
    positions = params.get("max_position_embeddings") or params.get("max_seq_len") or 32768
    # Mistral 7B 0.1 has windows and the base of Llama; later ones have neither.
    base = params.get("rope_theta") or (10000.0 if window else 1000000.0)
    return {
        "model_type": "mistral",
        "sliding_window": window,
        "max_position_embeddings": positions,
        "rope_theta": base,
    }


def _llama(params: Mapping[str, Any]) -> dict[str, Any]:
    """Positions are not in the file: those with which the generation of this rotary base was published."""
    base = float(params.get("rope_theta", 10000.0))
    scaled = bool(params.get("use_scaled_rope"))
    positions = 131072 if scaled else 8192 if base == LLAMA_3_BASE else 16384 if base > 10000.0 else 4096
    return {
        "model_type": "llama",
        "max_position_embeddings": params.get("max_seq_len") or positions,
        "rope_theta": base,
        "rope_scaling": _scaling(params) if scaled else None,
    }


def _scaling(params: Mapping[str, Any]) -> dict[str, Any]:
    """Llama 3.1 stretches by 8; the small models of 3.2 (hidden size below 4096) by 32."""
    factor = params.get("rope_scaling_factor") or (8 if params["dim"] >= 4096 else 32)
    return {
        "rope_type": "llama3",
        "factor": float(factor),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


# -- Meta's Llama ------------------------------------------------------------------------------------

SCALING = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""The scaling that Meta's code has in it, beside its factor."""
ORIGINAL_POSITIONS = 8192
MAX_DIGITS = 17
LANGUAGE_MODEL = "LlamaForCausalLM"


def from_hugging_face(external: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for a model that is no Llama of Meta's kind."""
    _require_llama(external)
    dim, scaled = external["hidden_size"], external.get("rope_scaling") is not None
    return {
        "dim": dim,
        "n_layers": external["num_hidden_layers"],
        "n_heads": external["num_attention_heads"],
        "n_kv_heads": external["num_key_value_heads"],
        "vocab_size": external["vocab_size"],
        **feed_forward_params(dim, external["intermediate_size"]),
        "norm_eps": external["rms_norm_eps"],
        "rope_theta": external["rope_theta"],
        **({"use_scaled_rope": True} if scaled else {}),
        **(_factor(external) if scaled else {}),
    }


def of_llama_3(params: Mapping[str, Any]) -> bool:
    """Whether Meta's code for Llama 3 reads such a model: it has another class for the embedding."""
    return params["rope_theta"] == LLAMA_3_BASE or bool(params.get("use_scaled_rope"))


def feed_forward_params(dim: int, width: int) -> dict[str, Any]:
    """multiple_of and ffn_dim_multiplier with which Meta's code computes the inner width.

    It takes two thirds of 4 dim, times the multiplier, and rounds up to a multiple. Raises ConfigError for a width that
    no multiplier gives.
    """
    multiple = width & -width  # the largest power of two that divides it
    if feed_forward_width(dim, multiple, None) == width:
        return {"multiple_of": multiple}
    # The product is cut to a whole number before it is rounded up: it may lie from width - multiple + 1 to width + 1.
    middle = (width - multiple / 2 + 1) / feed_forward_width(dim, 1, None)
    # From few digits to many: the published multipliers (1.3, 1.5) are found again.
    for digits in range(1, MAX_DIGITS):
        factor = float(f"{middle:.{digits}g}")
        if feed_forward_width(dim, multiple, factor) == width:
            return {"multiple_of": multiple, "ffn_dim_multiplier": factor}
    raise ConfigError(f"model.ffn_hidden_size={width} is none that Meta's code computes for model.hidden_size={dim}")


def feed_forward_width(dim: int, multiple: int, factor: float | None) -> int:
    """The inner width as Meta's code computes it."""
    # Two thirds: with a gate there are three matrices in place of two, so that the parameters stay the same.
    width = int(2 * (4 * dim) / 3)
    if factor is not None:
        width = int(factor * width)
    return multiple * ((width + multiple - 1) // multiple)


def _require_llama(external: Mapping[str, Any]) -> None:
    heads, hidden = external.get("num_attention_heads", 0), external.get("hidden_size", 0)
    if external["model_type"] != "llama":
        raise ConfigError(f"meta holds Llama only; in Hugging Face's format this model is a {external['model_type']}")
    architectures = external.get("architectures") or [LANGUAGE_MODEL]
    if architectures != [LANGUAGE_MODEL]:
        raise ConfigError(f"meta holds language models only; in Hugging Face's format this one is a {architectures[0]}")
    if external["head_dim"] * heads != hidden:
        raise ConfigError(
            f"model.kv_channels={external['head_dim']} cannot be written as Meta's Llama, whose heads have hidden_size "
            f"/ num_attention_heads = {hidden // heads} channels"
        )
    if external.get("attention_bias") or external.get("mlp_bias"):
        raise ConfigError("Meta's Llama has no biases: model.attention_bias and model.mlp_bias have to be false")


def _factor(external: Mapping[str, Any]) -> dict[str, Any]:
    scaling = dict(external["rope_scaling"])
    factor, original = scaling.pop("factor", None), scaling.pop("original_max_position_embeddings", None)
    if scaling != SCALING or original != ORIGINAL_POSITIONS:
        raise ConfigError(
            f"rope_scaling={external['rope_scaling']} cannot be written as Meta's Llama, whose code has {SCALING} and "
            f"original_max_position_embeddings={ORIGINAL_POSITIONS}"
        )
    # Left out where Meta's code has it by itself.
    usual = 8.0 if external["hidden_size"] >= 4096 else 32.0
    return {} if factor == usual else {"rope_scaling_factor": factor}
