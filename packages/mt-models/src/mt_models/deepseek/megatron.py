"""Megatron's arguments for DeepSeek-V2 and V3: multi-head latent attention, multi-token prediction."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mt_core.config_map import MegatronArguments, MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.megatron import (
    depth_arguments,
    kind_of_model,
    moe_arguments,
    moe_section,
    mscale_arguments,
    mscale_section,
    mtp_section,
    need_values,
    normalization,
    position_arguments,
    positions,
    require,
    shared_arguments,
    shared_section,
)

VARIANT, SPARSE = "experimental_attention_variant", "dsa"
READS = ("multi_latent_attention", "mtp_num_layers")
"""Arguments that other families need off."""
GRANTED: Mapping[str, tuple[Any, Any]] = {
    "swiglu": (False, True),
    "add_bias_linear": (True, False),
    "add_qkv_bias": (False, False),
    "hidden_dropout": (0.1, 0.0),
    "qk_layernorm": (False, True),
    "rotary_percent": (1.0, 1.0),
    "rotary_interleaved": (False, False),
    "mtp_use_repeated_layer": (False, False),
    "mtp_detach_heads": (False, False),
    "mtp_hsm": (False, False),
    "window_size": (None, None),
}
SIZES: Mapping[str, int] = {"kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
"""Arguments that are keys of the same name, with Megatron's defaults."""
YARN: Mapping[str, Any] = {
    "rope_beta_fast": 32.0,
    "rope_beta_slow": 1.0,
    "rope_truncate": True,
    "rope_attention_factor": None,
}
"""Constants of Megatron's latent attention that have no argument."""
ORIGINAL_POSITIONS = 4096
"""The same, of the positions before scaling."""


def has_latent_attention(args: MegatronArguments, names: Collection[str]) -> bool:
    return kind_of_model(args, names) == "latent" and args.get(VARIANT) != SPARSE


def deepseek_section(args: MegatronArguments, names: Collection[str]) -> dict[str, Any]:
    need_values(args, "a model with multi-latent attention", GRANTED)
    positions(args, ("rope",))
    keys = {
        **shared_section(args),
        "num_layers": int(args.need("num_layers", "encoder_num_layers")),
        "normalization": normalization(args),
        "untie_embeddings_and_output_weights": args.untied,
        "q_lora_rank": args.values.get("q_lora_rank"),
        **{name: int(args.get(name, default)) for name, default in SIZES.items()},
        "max_position_embeddings": int(args.need("max_position_embeddings")),
        "rotary_base": float(args.get("rotary_base", 10000)),
        **_scaling(args),
        **moe_section(args),
    }
    return {**keys, **mtp_section(args)}


def _scaling(args: MegatronArguments) -> dict[str, Any]:
    """YaRN unless the run requested plain rotary positions; with a factor of 1 it changes nothing."""
    factor = float(args.get("rotary_scaling_factor", 1.0))
    if args.get("rope_type", "yarn") != "yarn" or factor == 1.0:
        return {}
    return {
        "rope_scaling_type": "yarn",
        "rope_scaling_factor": factor,
        "original_max_position_embeddings": ORIGINAL_POSITIONS,
        **mscale_section(args),
    }


def deepseek_arguments(model: Any, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **shared_arguments(model),
        **depth_arguments(model),
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "q_lora_rank": model.q_lora_rank,
        **{name: getattr(model, name) for name in SIZES},
        # Megatron computes it so for every model; latent attention has head sizes of its own.
        "kv_channels": model.hidden_size // model.num_attention_heads,
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
        "max_position_embeddings": model.max_position_embeddings,
        **position_arguments("rope"),
        "rotary_base": model.rotary_base,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "use_rope_scaling": False,
        **_scaling_arguments(model),
        **moe_arguments(model, parameters),
        "mtp_num_layers": model.mtp_num_layers or None,
        "mtp_loss_scaling_factor": model.mtp_loss_scaling_factor,
        "window_size": None,
    }


def _scaling_arguments(model: Any) -> dict[str, Any]:
    require(model, "latent_norm_epsilon", (None, model.norm_epsilon))
    require(model, "rope_scaling_type", ("none", "yarn"))
    if model.rope_scaling_type == "none":
        return {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    for key, granted in YARN.items():
        require(model, key, (granted,))
    original = model.original_max_position_embeddings or model.max_position_embeddings
    if original != ORIGINAL_POSITIONS:
        raise ConfigError(
            f"model.original_max_position_embeddings={original} cannot be written as Megatron's arguments, which fix "
            f"it at {ORIGINAL_POSITIONS} for latent attention"
        )
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": model.rope_scaling_factor,
        **mscale_arguments(model),
    }


MEGATRON = MegatronMap(arguments=deepseek_arguments, takes=has_latent_attention, section=deepseek_section, reads=READS)
