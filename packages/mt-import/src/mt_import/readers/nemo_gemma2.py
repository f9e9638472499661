"""Gemma 2 as NeMo 1.x has it: the layers of Megatron-Core with softcaps, windows and norms behind them in NeMo's code.

Facts of NeMo 1.24 (`collections/nlp/models/language_modeling/megatron/gemma2`): layers with even numbers, counted from
1, have the window. Transformers' class has it in the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config.layer_pattern import pattern_of
from mt_core.errors import ConfigError

SCALAR = "model.sqrt_query_pre_attn_scalar"
CUSTOM = "mcore_customization_config."
"""Keys that NeMo hands on to the layers."""
SOFTCAPS: Mapping[str, float] = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
"""Key, here and there -> its value in the published models, where a file leaves it out."""
WINDOW = 4096
FIXED: Mapping[str, Any] = {
    "family": "gpt",
    "activation": "geglu_tanh",
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "untie_embeddings_and_output_weights": False,
}
"""Keys of the gpt that a file describes otherwise -> what Gemma 2 has."""
KEPT = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"),
    *("norm_epsilon", "attention_dropout", "init_method_std", "use_scaled_init_method", "make_vocab_size_divisible_by"),
)
"""Keys of both families."""


def gemma2_keys(flat: Mapping[str, Any]) -> dict[str, Any] | None:
    """Keys of the family gemma that gpt does not have; None for another model. flat: dotted path -> value."""
    custom = {key.rpartition(".")[2]: value for key, value in flat.items() if CUSTOM in key and value is not None}
    root, scalar = flat.get(SCALAR), custom.get("query_pre_attn_scalar")
    if root is None and scalar is None:
        return None
    window = custom.get("window_size")
    return {
        "query_pre_attn_scalar": float(scalar) if scalar is not None else round(float(root or 0) ** 2, 2),
        **{key: float(custom.get(key, value)) for key, value in SOFTCAPS.items()},
        # NeMo's first number counts the positions before the query.
        "sliding_window": WINDOW if window is None else int(window[0]) + 1,
    }


def is_of_gemma2(key: str) -> bool:
    names = (*SOFTCAPS, "window_size", "query_pre_attn_scalar")
    return key == SCALAR or (CUSTOM in key and key.rpartition(".")[2] in names)


def gemma2_section(model: Mapping[str, Any], keys: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """model: [model] of the gpt that the file describes otherwise. defaults: of the family gpt. Raises ConfigError,
    naming the key, for what Gemma 2 has otherwise."""
    for key, wanted in FIXED.items():
        if (value := model.get(key, defaults.get(key))) != wanted:
            raise ConfigError(f"{SCALAR} makes it a Gemma 2, which has {key}={wanted}, and not {value}")
    if abs(model.get("embedding_multiplier", 1.0) - model["hidden_size"] ** 0.5) > 1e-3:
        raise ConfigError(f"{SCALAR} makes it a Gemma 2, which has model.apply_embedding_scaling=true")
    base = float(model.get("rotary_base", 10000.0))
    return {
        "family": "gemma",
        **{key: model[key] for key in KEPT if key in model},
        "max_position_embeddings": model["max_position_embeddings"],
        "rotary_base": base,
        "rotary_base_local": base,
        "qk_layernorm": False,
        "sliding_window_pattern": pattern_of([bool(layer % 2) for layer in range(model["num_layers"])]),
        **keys,
    }
