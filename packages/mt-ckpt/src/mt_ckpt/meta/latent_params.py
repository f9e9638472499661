"""Mistral's own layout of models with latent attention and experts (Mistral Large 3): params.json as the contents of a
`mistral4`'s config.json, and the names of tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from mt_core.errors import CheckpointError, ConfigError

# -- params.json ---------------------------------------------------------------------------------------

SAME = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "vocab_size")
SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
    **{key: key for key in SAME},
}
EXPERTS = {
    "first_k_dense_replace": "first_k_dense_replace",
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "expert_hidden_dim": "moe_intermediate_size",
    "routed_scale": "routed_scaling_factor",
}
FIXED: Mapping[str, Any] = {"route_every_n": 1, "num_expert_groups": 1, "num_expert_groups_per_tok": 1}
IGNORED = {"expert_parallel", "expert_model_parallel"}
"""How experts were sharded over ranks."""
YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
KNOWN = {
    *SIZES, "n_kv_heads", "head_dim", "rope_theta", "tied_embeddings", "max_seq_len", "max_batch_size", "model_type",
    "llama_4_scaling", "yarn", "moe", "quantization_config", "vision_encoder", "quantization",
}  # fmt: skip
EPSILON = 1e-6
"""Epsilon of all norms in a folder of Mistral's. The norms of latents of mistral4 have another."""


def has_latent_attention(params: Mapping[str, Any]) -> bool:
    return bool(params.get("kv_lora_rank"))


def to_mistral4(params: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the decoder. Raises ConfigError for parameters that are missing, unknown or not supported."""
    _require(params, SIZES, "")
    if unknown := sorted(set(params) - KNOWN):
        settings = ", ".join(f"{key}={params[key]!r}" for key in unknown)
        raise ConfigError(f"params.json: {settings} is not known; known are {', '.join(sorted(KNOWN))}")
    for key, only in (("norm_eps", EPSILON), ("n_kv_heads", params["n_heads"]), ("quantization", None)):
        if params.get(key, only) != only:
            raise ConfigError(f"params.json: {key}={params[key]!r} is not supported; it can be {only}")
    quantized = {key: params[key] for key in ("quantization_config",) if params.get(key)}
    return {
        "model_type": "mistral4",
        **{theirs: params[name] for name, theirs in SIZES.items()},
        "num_key_value_heads": params["n_heads"],
        "tie_word_embeddings": bool(params.get("tied_embeddings", False)),
        "rope_parameters": _rope(params),
        **_experts(params),
        **quantized,
    }


def _require(table: Mapping[str, Any], keys: Iterable[str], prefix: str) -> None:
    if missing := [f"{prefix}{key}" for key in keys if table.get(key) is None]:
        raise ConfigError(f"params.json: {', '.join(missing)} is missing")


def _rope(params: Mapping[str, Any]) -> dict[str, Any]:
    yarn, growth = params.get("yarn") or {}, params.get("llama_4_scaling") or {}
    _require(yarn, YARN, "yarn.")
    _require(growth, ("beta", "original_max_position_embeddings"), "llama_4_scaling.")
    if unknown := sorted({*yarn} - {*YARN, "apply_scale"}):
        raise ConfigError(f"params.json: yarn.{unknown[0]}={yarn[unknown[0]]!r} is not known")
    original = yarn["original_max_position_embeddings"]
    if growth["original_max_position_embeddings"] != original:
        raise ConfigError(
            f"params.json: llama_4_scaling.original_max_position_embeddings="
            f"{growth['original_max_position_embeddings']} is not supported; it can be that of yarn, {original}"
        )
    # apply_scale: scores grow with the factor.
    scale = {"mscale": 1.0, "mscale_all_dim": 1.0} if yarn.get("apply_scale", True) else {"attention_factor": 1.0}
    return {
        "rope_type": "yarn",
        "rope_theta": float(params.get("rope_theta", 10000.0)),
        "llama_4_scaling_beta": float(growth["beta"]),
        **{theirs: yarn[name] for name, theirs in YARN.items()},
        **scale,
    }


def _experts(params: Mapping[str, Any]) -> dict[str, Any]:
    moe = params.get("moe") or {}
    _require(moe, EXPERTS, "moe.")
    if unknown := sorted({*moe} - {*EXPERTS, *FIXED, *IGNORED}):
        raise ConfigError(f"params.json: moe.{unknown[0]}={moe[unknown[0]]!r} is not known")
    for key, only in FIXED.items():
        if moe.get(key, only) != only:
            raise ConfigError(f"params.json: moe.{key}={moe[key]!r} is not supported; it can be {only}")
    return {theirs: moe[name] for name, theirs in EXPERTS.items()}


# -- names ---------------------------------------------------------------------------------------------

TOWER = ("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm.")
"""Tensors of the image tower, which the family does not have."""
TOP = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
GATED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
IN_LAYER = {
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate",
    **{f"feed_forward.{name}": f"mlp.{theirs}" for name, theirs in GATED.items()},
    **{f"shared_experts.{name}": f"mlp.shared_experts.{theirs}" for name, theirs in GATED.items()},
}
EXPERT = re.compile(r"experts\.([0-9]+)\.(w[123])")


def renamed(names: Iterable[str]) -> dict[str, str]:
    """Hugging Face's name -> the stored one, of all tensors but those of the image tower. Raises CheckpointError for
    names that are not of this layout."""
    return {_renamed(name): name for name in names if not name.startswith(TOWER)}


def of_tower(names: Iterable[str]) -> dict[str, int]:
    """Patterns of tensors of the image tower, and how many each stands for."""
    starts = (next((start for start in TOWER if name.startswith(start)), None) for name in names)
    return dict(Counter(f"{start}*" for start in starts if start is not None))


def _renamed(name: str) -> str:
    """With what stands behind the matrix as it is: weight, or scales of one that is quantized."""
    stem, _, part = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{part}"
    layer = re.fullmatch(r"layers\.([0-9]+)\.(.+)", stem)
    expert = EXPERT.fullmatch(layer[2]) if layer else None
    inner = f"mlp.experts.{expert[1]}.{GATED[expert[2]]}" if expert else IN_LAYER.get(layer[2]) if layer else None
    if layer is None or inner is None:
        raise CheckpointError(f"tensor {name} is not one of Mistral's layout with latent attention")
    return f"model.layers.{layer[1]}.{inner}.{part}"
