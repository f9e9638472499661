"""Decoders of the family gpt: whatever is not one of the families of `rotary` and `latent`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mt_ckpt.megatron.arguments import Arguments
from mt_ckpt.megatron.families.moe import moe_arguments, moe_section
from mt_ckpt.megatron.families.shared import (
    LEARNED,
    activation,
    depth_arguments,
    head_size,
    normalization,
    position_arguments,
    positions,
    query_groups,
    require,
    shared_arguments,
    shared_section,
    window_arguments,
)


def depth_and_heads(args: Arguments) -> dict[str, Any]:
    return {
        "num_layers": int(args.need("num_layers", "encoder_num_layers")),
        **head_size(args),
        "untie_embeddings_and_output_weights": args.untied,
        **moe_section(args),
        **query_groups(args),
    }


def gpt_section(args: Arguments) -> dict[str, Any]:
    bias = bool(args.get("add_bias_linear", True))
    section: dict[str, Any] = {
        "family": "gpt",
        **shared_section(args),
        **depth_and_heads(args),
        "hidden_dropout": float(args.get("hidden_dropout", 0.1)),
        "activation": activation(args),
        "position_embedding_type": positions(args, (LEARNED, "rope", "none")),
        "normalization": normalization(args),
        "qk_layernorm": bool(args.get("qk_layernorm", False)),
        "add_bias_linear": bias,
    }
    # Biases in all linear layers include those of queries, keys and values.
    if not bias and args.get("add_qkv_bias", False):
        section["add_qkv_bias"] = True
    if section["position_embedding_type"] == LEARNED:
        section["max_position_embeddings"] = int(args.need("max_position_embeddings"))
    if section["position_embedding_type"] == "rope":
        section["rotary_base"] = float(args.get("rotary_base", 10000))
        section["rotary_percent"] = float(args.get("rotary_percent", 1.0))
        section["rotary_interleaved"] = bool(args.get("rotary_interleaved", False))
    return section


def decoder_arguments(model: Any, parameters: Collection[str]) -> dict[str, Any]:
    return {
        **shared_arguments(model),
        **depth_arguments(model),
        "qk_layernorm": model.qk_layernorm,
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias or model.add_bias_linear,
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
        **window_arguments(model),
        **moe_arguments(model, parameters),
    }


def gpt_arguments(model: Any, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    require(model, "position_embedding_type", (LEARNED, "rope", "none"))
    require(model, "parallel_residual", (False,))
    require(model, "embedding_layernorm", (False,))
    # Models without learned positions have no longest sequence; Megatron's argument is required.
    longest = model.max_position_embeddings or kept.get("max_position_embeddings") or kept.get("seq_length") or 2048
    return {
        **decoder_arguments(model, parameters),
        "max_position_embeddings": longest,
        **position_arguments(model.position_embedding_type),
        "rotary_base": model.rotary_base,
        "rotary_percent": model.rotary_percent,
        "rotary_interleaved": model.rotary_interleaved,
        "use_rope_scaling": False,
        "rotary_seq_len_interpolation_factor": None,
    }
