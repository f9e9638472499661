"""Megatron's arguments for the decoders of the family gpt: all that are not Llama-like."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from mt_core.config_map import MegatronArguments, MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.megatron import (
    CONNECTS,
    LEARNED,
    activation,
    kind_of_model,
    mtp_section,
    normalization,
    position_arguments,
    positions,
    require,
    shared_section,
    stream_arguments,
    stream_section,
)
from mt_models.blocks.megatron_decoder import (
    decoder_arguments,
    depth_and_heads,
    differing,
    require_no_extras,
    rotates_neighbours,
)
from mt_models.gpt.config import FACTORS

READS = ("use_mup", "mtp_num_layers", *CONNECTS)
"""Arguments that other families need off."""


def is_gpt(args: MegatronArguments, names: Collection[str]) -> bool:
    """Whether it is a decoder that is not one of the Llama-like families."""
    # Both compute a plain rotary decoder alike. The Llama-like families are preferred, since Hugging Face's formats
    # have them under these names.
    return kind_of_model(args, names) == "decoder" and bool(differing(args)) and not rotates_neighbours(args)


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
    section |= {**_mup_section(args), **mtp_section(args), **stream_section(args)}
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
    if model.mup_base_hidden_size is None:
        for key in ("embedding_multiplier", "attention_multiplier", "logits_scaling"):
            require(model, key, FACTORS[key])
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
        **_mup_arguments(model),
        **stream_arguments(model),
        "mtp_num_layers": model.mtp_num_layers or None,
        "mtp_loss_scaling_factor": model.mtp_loss_scaling_factor,
    }


def _mup_section(args: MegatronArguments) -> dict[str, Any]:
    """Megatron-Core 0.17's maximal update parametrization, whose options are read with --use-mup alone."""
    if not args.get("use_mup", False):
        return {}
    hidden, heads = int(args.need("hidden_size")), int(args.need("num_attention_heads"))
    base = int(args.get("mup_base_hidden_size", None) or hidden)
    head_dim = int(args.get("kv_channels", None) or hidden // heads)
    base_head, power = args.get("mup_base_head_dim", None), float(args.get("mup_attn_scale_power", 1.0))
    output = float(args.get("mup_output_mult", 1.0))
    section: dict[str, Any] = {
        "mup_base_hidden_size": base,
        "embedding_multiplier": float(args.get("mup_embedding_mult", 1.0)),
        "attention_multiplier": float(base_head or 1.0) ** 0.5 / head_dim**power,
    }
    # Megatron takes 1 for "not given", and divides by the multiple of the width.
    return section if output == 1.0 else {**section, "logits_scaling": 1.0 / output}


def _mup_arguments(model: Any) -> dict[str, Any]:
    if model.mup_base_hidden_size is None:
        return {"use_mup": False}
    if model.logits_divisor == 1.0 != model.width_multiplier:
        raise ConfigError(
            f"model.logits_scaling=1.0 cannot be written as Megatron's arguments, whose mup_output_mult=1.0 is the "
            f"default, {1.0 / model.width_multiplier:g}; write another factor, or none"
        )
    factor = model.query_scale / math.sqrt(model.head_dim)
    return {
        "use_mup": True,
        "mup_base_hidden_size": model.mup_base_hidden_size,
        "mup_width_mult": model.width_multiplier,
        "mup_embedding_mult": model.embedding_multiplier,
        # sqrt(mup_base_head_dim) / kv_channels ** mup_attn_scale_power; any factor is one of a base size with power 1.
        "mup_base_head_dim": (factor * model.head_dim) ** 2,
        "mup_attn_scale_power": 1.0,
        "mup_output_mult": 1.0 / model.logits_divisor,
    }


MEGATRON = MegatronMap(arguments=gpt_arguments, takes=is_gpt, section=gpt_section, reads=READS)
