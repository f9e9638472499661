"""Megatron's arguments for hybrids: Mamba-2, attention and feed-forward layers in one stack."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mt_core.config_map import MegatronArguments, MegatronMap
from mt_models.blocks.megatron import (
    CONNECTS,
    LEARNED,
    activation,
    head_size,
    kind_of_model,
    moe_arguments,
    moe_section,
    normalization,
    position_arguments,
    positions,
    query_groups,
    require,
    shared_arguments,
    shared_section,
    stream_arguments,
    stream_section,
)
from mt_models.mamba.megatron import (
    READS,
    layer_pattern,
    mixer_arguments,
    mixer_section,
    needs_hybrid,
    predicted_section,
)

FACTORS: Mapping[str, Any] = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": None,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
"""Granite's factors, which have no arguments, when they change nothing."""


def is_hybrid(args: MegatronArguments, names: Collection[str]) -> bool:
    """Whether some layers are Mamba's, and the family of Mamba alone does not have the model."""
    return kind_of_model(args, names) == "hybrid" and needs_hybrid(args)


def hybrid_section(args: MegatronArguments, names: Collection[str]) -> dict[str, Any]:
    return {
        **shared_section(args),
        **head_size(args),
        **query_groups(args),
        **mixer_section(args),
        "normalization": normalization(args),
        "hidden_dropout": float(args.get("hidden_dropout", 0.1)),
        "hybrid_layer_pattern": layer_pattern(args),
        **_attention(args),
        "activation": activation(args),
        "add_bias_linear": bool(args.get("add_bias_linear", True)),
        **_experts(args),
        **predicted_section(args),
        **stream_section(args),
    }


def _attention(args: MegatronArguments) -> dict[str, Any]:
    kind = positions(args, ("none", "rope", LEARNED))
    if kind == "none":
        return {"position_embedding_type": "none"}
    if kind == LEARNED:
        return {
            "position_embedding_type": LEARNED,
            "max_position_embeddings": int(args.need("max_position_embeddings")),
        }
    return {
        "position_embedding_type": "rope",
        "rotary_base": float(args.get("rotary_base", 10000)),
        "rotary_percent": float(args.get("rotary_percent", 1.0)),
    }


def _experts(args: MegatronArguments) -> dict[str, Any]:
    """The pattern says which layers have experts."""
    section = moe_section(args)
    for options in section.values():
        options.pop("moe_layer_freq")
    return section


def hybrid_arguments(model: Any, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    require(model, "mtp_num_layers", (0,))
    for key, neutral in FACTORS.items():
        require(model, key, (neutral,))
    return {
        **shared_arguments(model),
        **mixer_arguments(model, model.layers),
        **position_arguments(model.position_embedding_type),
        "rotary_base": model.rotary_base,
        "rotary_percent": model.rotary_percent,
        "rotary_interleaved": False,
        "use_rope_scaling": False,
        "rotary_seq_len_interpolation_factor": None,
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_bias_linear,
        "qk_layernorm": False,
        "max_position_embeddings": model.table_size
        or kept.get("max_position_embeddings")
        or kept.get("seq_length")
        or 2048,
        **moe_arguments(model, parameters),
        **stream_arguments(model),
        "moe_layer_freq": 1,
    }


MEGATRON = MegatronMap(arguments=hybrid_arguments, takes=is_hybrid, section=hybrid_section, reads=(*READS, *CONNECTS))
