"""`params.json` of Meta's Llama, from the contents of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_ckpt.meta.params import LLAMA_3_BASE
from mt_core.errors import ConfigError

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
    """As Meta's code computes it."""
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
