"""Mamba-2 alone, and in one stack with attention and feed-forward layers: Megatron's hybrid models."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mt_ckpt.megatron.arguments import Arguments
from mt_ckpt.megatron.families.moe import moe_arguments, moe_section
from mt_ckpt.megatron.families.shared import (
    activation,
    depth_arguments,
    head_size,
    initial_arguments,
    initial_section,
    need_values,
    norm_epsilon,
    position_arguments,
    positions,
    query_groups,
    require,
    shared_arguments,
    shared_section,
)
from mt_core.errors import ConfigError

READ = ("is_hybrid_model", "hybrid_layer_pattern", "hybrid_override_pattern")
"""Arguments that other families need off."""
GRANTED: Mapping[str, tuple[Any, Any]] = {
    "normalization": ("LayerNorm", "RMSNorm"),
    "hidden_dropout": (0.1, 0.0),
    "qk_layernorm": (False, False),
    "rotary_interleaved": (False, False),
    "rotary_seq_len_interpolation_factor": (1, 1),
    "use_rope_scaling": (False, False),
    "window_size": (None, None),
}
NORM_EPSILON = 1e-5
"""Of the gated norm within Megatron's mixer, whatever the other norms have; ours have one for all."""
SIZES: Mapping[str, int] = {"mamba_head_dim": 64, "mamba_state_dim": 128, "mamba_num_groups": 8}
"""Arguments that are keys of the same name, with Megatron's defaults."""
FIXED: Mapping[str, Any] = {
    "mamba_conv_kernel": 4,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_dt_lower_limit": 0.0,
    "mamba_dt_upper_limit": None,
}
"""Keys that Megatron's mixer has no argument for -> what it means."""
MAMBA, STAGE = "M", "|"
LAYERS: Mapping[str, str] = {MAMBA: "Mamba-2", "*": "attention", "-": "feed-forward", "E": "experts"}
"""Symbols of the pattern that stand for a layer of ours."""


def is_hybrid(args: Arguments, names: Collection[str]) -> bool:
    given = args.get("is_hybrid_model", False) or any(args.get(name) for name in READ[1:])
    # The stored parameters show it where no argument does.
    return bool(given) or any(".mixer." in name for name in names)


def hybrid_section(args: Arguments) -> dict[str, Any]:
    need_values(args, "a model with Mamba layers", GRANTED)
    if norm_epsilon(args) != NORM_EPSILON:
        raise ConfigError(
            f"{args.origin}: norm_epsilon={norm_epsilon(args):g} is not read of a model with Mamba layers, whose inner "
            f"norms have {NORM_EPSILON:g} in Megatron; it can be {NORM_EPSILON:g}"
        )
    pattern = _pattern(args)
    mixer = {
        "untie_embeddings_and_output_weights": args.untied,
        "norm_epsilon": NORM_EPSILON,
        "fp32_residual_connection": bool(args.get("fp32_residual_connection", False)),
        **{name: int(args.get(name, default)) for name, default in SIZES.items()},
        "mamba_num_heads": args.values.get("mamba_num_heads"),
    }
    if set(pattern) == {MAMBA}:
        hidden = int(args.need("hidden_size"))
        return {
            "family": "mamba",
            **initial_section(args),
            "hidden_size": hidden,
            "num_layers": len(pattern),
            **mixer,
        }
    return {
        "family": "hybrid",
        **shared_section(args),
        **head_size(args),
        **query_groups(args),
        **mixer,
        "hybrid_layer_pattern": pattern,
        **_attention(args),
        "activation": activation(args),
        "add_bias_linear": bool(args.get("add_bias_linear", True)),
        **_experts(args),
    }


def _pattern(args: Arguments) -> str:
    """A symbol for each layer. Where stages begin belongs to the layout of the run, not to the model."""
    if given := args.get("hybrid_layer_pattern", args.get("hybrid_override_pattern")):
        pattern = str(given).replace(STAGE, "")
        if unknown := sorted(set(pattern) - set(LAYERS)):
            known = ", ".join(f"{symbol} ({kind})" for symbol, kind in LAYERS.items())
            raise ConfigError(
                f"{args.origin}: the hybrid pattern {given!r} has {', '.join(map(repr, unknown))}, which is not read; "
                f"a layer can be {known}"
            )
        return pattern
    for name in ("hybrid_attention_ratio", "hybrid_mlp_ratio"):
        if args.get(name, 0):
            raise ConfigError(
                f"{args.origin}: {name}={args.values[name]} does not say which layers are of which kind; the run needs "
                "hybrid_override_pattern in its arguments"
            )
    # Neither pattern nor ratios: all layers are Mamba's.
    return MAMBA * int(args.need("num_layers"))


def _attention(args: Arguments) -> dict[str, Any]:
    kind = positions(args, ("none", "rope"))
    if kind == "none":
        return {"position_embedding_type": "none"}
    return {
        "position_embedding_type": "rope",
        "rotary_base": float(args.get("rotary_base", 10000)),
        "rotary_percent": float(args.get("rotary_percent", 1.0)),
    }


def _experts(args: Arguments) -> dict[str, Any]:
    """The pattern says which layers have experts."""
    section = moe_section(args)
    for options in section.values():
        options.pop("moe_layer_freq")
    return section


def mamba_arguments(model: Any, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **initial_arguments(model),
        **_mixer_arguments(model, MAMBA * model.num_layers),
        **position_arguments("none"),
        # Megatron requires heads even of a model without attention; the mixer has its own number.
        "num_attention_heads": kept.get("num_attention_heads") or model.mamba_heads,
        "hidden_dropout": 0.0,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "max_position_embeddings": kept.get("max_position_embeddings") or kept.get("seq_length") or 2048,
    }


FACTORS: Mapping[str, Any] = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": None,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
"""Granite's factors, which have no arguments, when they change nothing."""


def hybrid_arguments(model: Any, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    for key, neutral in FACTORS.items():
        require(model, key, (neutral,))
    return {
        **shared_arguments(model),
        **_mixer_arguments(model, model.layers),
        **position_arguments(model.position_embedding_type),
        "rotary_base": model.rotary_base,
        "rotary_percent": model.rotary_percent,
        "rotary_interleaved": False,
        "use_rope_scaling": False,
        "rotary_seq_len_interpolation_factor": None,
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_bias_linear,
        "qk_layernorm": False,
        "max_position_embeddings": kept.get("max_position_embeddings") or kept.get("seq_length") or 2048,
        **moe_arguments(model, parameters),
        "moe_layer_freq": 1,
    }


def _mixer_arguments(model: Any, pattern: str) -> dict[str, Any]:
    for key, meant in FIXED.items():
        require(model, key, (meant,))
    require(model, "norm_epsilon", (NORM_EPSILON,))
    return {
        **depth_arguments(model),
        "is_hybrid_model": True,
        "hybrid_layer_pattern": pattern,
        **{name: getattr(model, name) for name in SIZES},
        "mamba_num_heads": model.mamba_heads,
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
        "fp32_residual_connection": model.fp32_residual_connection,
        "window_size": None,
    }
