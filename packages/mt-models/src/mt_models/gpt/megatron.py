"""Megatron's arguments for the decoders of the family gpt: all that are not Llama-like."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mt_core.config_map import MegatronArguments, MegatronMap
from mt_models.blocks.megatron import (
    LEARNED,
    activation,
    kind_of_model,
    normalization,
    position_arguments,
    positions,
    require,
    shared_section,
)
from mt_models.blocks.megatron_decoder import decoder_arguments, depth_and_heads, differing, require_no_extras


def is_gpt(args: MegatronArguments, names: Collection[str]) -> bool:
    """Whether it is a decoder that is not one of the Llama-like families."""
    # Both compute a plain rotary decoder alike. The Llama-like families are preferred, since Hugging Face's formats
    # have them under these names.
    return kind_of_model(args, names) == "decoder" and bool(differing(args))


def gpt_section(args: MegatronArguments, names: Collection[str]) -> dict[str, Any]:
    require_no_extras(args, differing(args))
    bias = bool(args.get("add_bias_linear", True))
    section: dict[str, Any] = {
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


MEGATRON = MegatronMap(arguments=gpt_arguments, takes=is_gpt, section=gpt_section)
