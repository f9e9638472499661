"""Megatron's arguments for Mamba-2 layers: of models that have no others, and what hybrids share with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mt_core.config_map import MegatronArguments, MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.megatron import (
    LEARNED,
    connects_streams,
    depth_arguments,
    initial_arguments,
    initial_section,
    kind_of_model,
    need_values,
    norm_epsilon,
    normalization,
    position_arguments,
    position_type,
    require,
)

PREDICTS = ("mtp_num_layers", "mtp_hybrid_override_pattern")
READS = ("is_hybrid_model", "hybrid_layer_pattern", "hybrid_override_pattern", *PREDICTS)
"""Arguments that other families need off."""
GRANTED: Mapping[str, tuple[Any, Any]] = {
    "qk_layernorm": (False, False),
    "rotary_interleaved": (False, False),
    "rotary_seq_len_interpolation_factor": (1, 1),
    "use_rope_scaling": (False, False),
    "window_size": (None, None),
}
NORM_EPSILON = 1e-5
"""Epsilon of the gated norm within Megatron's mixer, whatever the other norms have; ours have one for all."""
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
MAMBA, STAGE, DEPTH = "M", "|", "/"
LAYERS: Mapping[str, str] = {MAMBA: "Mamba-2", "*": "attention", "-": "feed-forward", "E": "experts"}
"""Symbols of the pattern that stand for a layer of ours."""


def is_mamba(args: MegatronArguments, names: Collection[str]) -> bool:
    """Whether the model has Mamba layers, and it is nothing that only hybrids have."""
    return kind_of_model(args, names) == "hybrid" and not needs_hybrid(args)


def needs_hybrid(args: MegatronArguments) -> bool:
    """Whether a model has layers of other kinds, LayerNorm, dropout, positions or residual streams beside Mamba
    layers."""
    return (
        set(layer_pattern(args)) != {MAMBA}
        or normalization(args) != "RMSNorm"
        or float(args.get("hidden_dropout", 0.1)) > 0.0
        or position_type(args) == LEARNED
        or connects_streams(args)
        or bool(predicted_section(args))
    )


def mamba_section(args: MegatronArguments, names: Collection[str]) -> dict[str, Any]:
    return {
        **initial_section(args),
        "hidden_size": int(args.need("hidden_size")),
        "num_layers": len(layer_pattern(args)),
        **mixer_section(args),
    }


def mixer_section(args: MegatronArguments) -> dict[str, Any]:
    """Raises ConfigError, naming the argument, for Mamba layers that are none of ours."""
    need_values(args, "a model with Mamba layers", GRANTED)
    epsilon = norm_epsilon(args)
    if MAMBA in layer_pattern(args) and epsilon != NORM_EPSILON:
        raise ConfigError(
            f"{args.origin}: norm_epsilon={epsilon:g} is not read of a model with Mamba layers, whose inner "
            f"norms have {NORM_EPSILON:g} in Megatron; it can be {NORM_EPSILON:g}"
        )
    return {
        "untie_embeddings_and_output_weights": args.untied,
        "norm_epsilon": epsilon,
        "fp32_residual_connection": bool(args.get("fp32_residual_connection", False)),
        **{name: int(args.get(name, default)) for name, default in SIZES.items()},
        "mamba_num_heads": args.values.get("mamba_num_heads"),
    }


def layer_pattern(args: MegatronArguments) -> str:
    """A symbol for each layer. Where stages begin belongs to the layout of the run, not to the model."""
    if argument := args.get("hybrid_layer_pattern", args.get("hybrid_override_pattern")):
        pattern = str(argument).partition(DEPTH)[0].replace(STAGE, "")
        if unknown := sorted(set(pattern) - set(LAYERS)):
            known = ", ".join(f"{symbol} ({kind})" for symbol, kind in LAYERS.items())
            raise ConfigError(
                f"{args.origin}: the hybrid pattern {argument!r} has {', '.join(map(repr, unknown))}, which is not "
                f"read; a layer can be {known}"
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


def predicted_section(args: MegatronArguments) -> dict[str, Any]:
    """Depths of multi-token prediction, each with the same layers: those of another argument, or behind a / in the
    pattern for each depth."""
    argument = str(args.get("hybrid_layer_pattern", args.get("hybrid_override_pattern")) or "")
    _, *depths = argument.split(DEPTH)
    count = int(args.get("mtp_num_layers", None) or len(depths))
    layers = depths or [str(args.get("mtp_hybrid_override_pattern", ""))] * count
    if len(layers) != count or len(set(layers)) > 1 or "" in layers:
        raise ConfigError(
            f"{args.origin}: mtp_num_layers={count} of the pattern {argument!r} is not read: it can be the number of "
            "depths of multi-token prediction in it, each with the same layers, or mtp_hybrid_override_pattern has them"
        )
    if not count:
        return {}
    factor = float(args.get("mtp_loss_scaling_factor", 0.1))
    return {"mtp_num_layers": count, PREDICTS[1]: layers[0], "mtp_loss_scaling_factor": factor}


def mamba_arguments(model: Any, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **initial_arguments(model),
        **mixer_arguments(model, MAMBA * model.num_layers),
        **position_arguments("none"),
        # Megatron requires heads even of a model without attention; the mixer has its own number.
        "num_attention_heads": kept.get("num_attention_heads") or model.mamba_heads,
        "hidden_dropout": 0.0,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "max_position_embeddings": kept.get("max_position_embeddings") or kept.get("seq_length") or 2048,
    }


def mixer_arguments(model: Any, pattern: str) -> dict[str, Any]:
    for key, meant in FIXED.items():
        require(model, key, (meant,))
    if MAMBA in pattern:
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


MEGATRON = MegatronMap(arguments=mamba_arguments, takes=is_mamba, section=mamba_section, reads=READS)
