"""MoE: Megatron's moe_* arguments and the options under [model.moe]."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from mt_ckpt.megatron.arguments import Arguments
from mt_ckpt.megatron.names import layer_of
from mt_core.errors import ConfigError

SAME: Mapping[str, Any] = {
    "moe_router_topk": 2,
    "moe_router_score_function": "softmax",
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_dtype": None,
    "moe_z_loss_coeff": None,
    "moe_token_drop_policy": "probs",
    "moe_expert_capacity_factor": None,
    "moe_pad_expert_input_to_capacity": False,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_latent_size": None,
    "moe_input_jitter_eps": None,
}
"""Arguments that are options of the same name and meaning, with Megatron's defaults."""
BIAS_RATE = "moe_router_bias_update_rate"
COEFFICIENT = 0.01
"""The default of our configuration for what a balance loss counts."""


def moe_section(args: Arguments) -> dict[str, Any]:
    """{"moe": options} for an MoE model, else nothing."""
    if not args.get("num_experts", 0):
        return {}
    options = {key: args.values[key] for key in SAME if args.values.get(key) is not None}
    options |= {"num_experts": int(args.values["num_experts"]), "moe_layer_freq": _frequency(args)}
    # Other score functions have no softmax that could come before the choice.
    if args.get("moe_router_score_function", "softmax") == "softmax":
        options["moe_router_pre_softmax"] = bool(args.get("moe_router_pre_softmax", False))
    if args.get("moe_router_enable_expert_bias", False):
        options[BIAS_RATE] = float(args.get(BIAS_RATE, 1e-3))
    return {"moe": options | _balancing(args)}


def _frequency(args: Arguments) -> int | str:
    given = args.get("moe_layer_freq", 1)
    return str([int(entry) for entry in given]).replace(" ", "") if isinstance(given, list | tuple) else given


def _balancing(args: Arguments) -> dict[str, Any]:
    """One type or several, each with its coefficient."""
    types = args.get("moe_router_load_balancing_type", "aux_loss")
    types = [types] if isinstance(types, str) else list(types)
    coefficients = args.get("moe_aux_loss_coeff", 0.0)
    coefficients = [coefficients] * len(types) if isinstance(coefficients, int | float) else list(coefficients)
    # sinkhorn and none are listed without a loss; their coefficients mean nothing.
    losses = [float(value) for kind, value in zip(types, coefficients, strict=False) if kind.endswith("loss")]
    options: dict[str, Any] = {"moe_router_load_balancing_type": types}
    return options | ({"moe_aux_loss_coeff": losses} if losses else {})


def moe_arguments(model: Any, parameters: Collection[str]) -> dict[str, Any]:
    """parameters: canonical names, which say what layers have experts. Raises ConfigError, naming the option, for a
    MoE that Megatron's arguments cannot express."""
    if model.moe is None:
        return {"num_experts": None}
    options = dict(model.moe)
    _require_sayable(model, options)
    return {
        **{key: options.get(key, default) for key, default in SAME.items()},
        BIAS_RATE: options.get(BIAS_RATE, 1e-3),
        "num_experts": options["num_experts"],
        "moe_layer_freq": _pattern(model, parameters),
        "moe_router_pre_softmax": options.get("moe_router_pre_softmax", False),
        "moe_ffn_hidden_size": options.get("moe_ffn_hidden_size") or model.ffn_size,
        **_balancing_arguments(options),
    }


def _require_sayable(model: Any, options: Mapping[str, Any]) -> None:
    """Options of ours that Megatron derives from others."""
    topk, groups = options.get("moe_router_topk", 2), options.get("moe_router_group_topk")
    derived = {
        # Megatron sums the best topk // groups scores of a group to choose groups (DeepSeek-V3: 8 // 4).
        "moe_router_group_score_topk": topk // groups if groups else None,
        "moe_router_bias": model.add_bias_linear,
    }
    for key, meant in derived.items():
        if options.get(key) not in (None, meant):
            raise ConfigError(
                f"model.moe.{key}={options[key]} cannot be written as Megatron's arguments, which mean {meant}; "
                "leave it out"
            )
    shared = options.get("moe_shared_expert_intermediate_size")
    if shared and model.add_bias_linear:
        raise ConfigError(
            f"model.moe.moe_shared_expert_intermediate_size={shared} of a model with biases in its linear layers: "
            "Megatron refuses to build it; its shared experts have no biases"
        )


def _pattern(model: Any, parameters: Collection[str]) -> int | list[int]:
    # Layers whose names have a router have experts: the parameters say it for frequencies and lists alike.
    stem = re.compile(r"^decoder\.layers\.\d+\.mlp\.router\.")
    with_experts = {found[1] for name in parameters if stem.match(name) and (found := layer_of(name))}
    pattern = [int(layer in with_experts) for layer in range(model.num_layers)]
    return 1 if all(pattern) else pattern


def _balancing_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    types = options.get("moe_router_load_balancing_type", ["aux_loss"])
    # Our list has a coefficient for each loss, Megatron's one for each type.
    losses = iter(options.get("moe_aux_loss_coeff") or [COEFFICIENT] * len(types))
    coefficients = [next(losses, 0.0) if kind.endswith("loss") else 0.0 for kind in types]
    return {
        "moe_router_load_balancing_type": types[0] if len(types) == 1 else types,
        "moe_aux_loss_coeff": coefficients[0] if len(types) == 1 else coefficients,
    }
