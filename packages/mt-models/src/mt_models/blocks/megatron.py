"""What several families share of Megatron's arguments: the kind of model that they show, arguments as keys of [model],
and those keys as arguments."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from mt_core.config.layer_pattern import read_pattern
from mt_core.config_map import MegatronArguments
from mt_core.errors import ConfigError

LEARNED = "learned_absolute"
ACTIVATIONS: Mapping[str, Mapping[str, Any]] = {
    "gelu": {},
    "gelu_tanh": {"openai_gelu": True},
    "squared_relu": {"squared_relu": True},
    "swiglu": {"swiglu": True},
    "clamped_swiglu": {"quick_geglu": True, "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0},
}
"""Our activations -> the arguments of Megatron that are another than in `PLAIN_GELU` for them."""
PLAIN_GELU: Mapping[str, Any] = {
    "openai_gelu": False,
    "squared_relu": False,
    "swiglu": False,
    "quick_geglu": False,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
}


# -- which model ----------------------------------------------------------------------------------------

Kind = Literal["hybrid", "latent", "sinks", "encoder", "encoder_decoder", "decoder"]
HYBRID_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
SOFTMAX, LEARNABLE = "softmax_type", "learnable"


def kind_of_model(args: MegatronArguments, names: Collection[str]) -> Kind:
    """The kind that arguments and stored parameters show, from the special to the general."""
    # Stored parameters show Mamba layers where no argument does; no argument names an encoder.
    patterns = any(args.get(name) for name in HYBRID_PATTERNS)
    if args.get("is_hybrid_model", False) or patterns or any(".mixer." in name for name in names):
        return "hybrid"
    if args.get("multi_latent_attention", False):
        return "latent"
    if args.get(SOFTMAX) == LEARNABLE:
        return "sinks"
    if any(name.startswith("encoder.") for name in names):
        return "encoder_decoder" if any(name.startswith("decoder.") for name in names) else "encoder"
    return "decoder"


# -- read --------------------------------------------------------------------------------------------


def shared_section(args: MegatronArguments) -> dict[str, Any]:
    """What all families with attention have."""
    hidden, heads = int(args.need("hidden_size")), int(args.need("num_attention_heads"))
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": int(args.get("ffn_hidden_size", 4 * hidden)),
        "norm_epsilon": norm_epsilon(args),
        "attention_dropout": float(args.get("attention_dropout", 0.1)),
        **initial_section(args),
    }


def initial_section(args: MegatronArguments) -> dict[str, Any]:
    """What all families have, with or without attention."""
    return {
        "init_method_std": float(args.get("init_method_std", 0.02)),
        "make_vocab_size_divisible_by": int(args.get("make_vocab_size_divisible_by", 128)),
    }


def norm_epsilon(args: MegatronArguments) -> float:
    return float(args.get("norm_epsilon", args.get("layernorm_epsilon", 1e-5)))


def activation(args: MegatronArguments) -> str:
    """Megatron's fused bias and GELU is the tanh approximation, whatever `openai_gelu` says."""
    if args.get("swiglu", False):
        return "swiglu"
    if args.get("squared_relu", False):
        return "squared_relu"
    # The fused kernel adds the bias of a linear layer, so it is used only where there is one.
    fused = args.get("bias_gelu_fusion", False) and args.get("add_bias_linear", True)
    return "gelu_tanh" if fused or args.get("openai_gelu", False) else "gelu"


def head_size(args: MegatronArguments) -> dict[str, int]:
    """kv_channels, where it is not what our families take for it."""
    size = int(args.need("hidden_size")) // int(args.need("num_attention_heads"))
    channels = int(args.get("kv_channels", size))
    return {"kv_channels": channels} if channels != size else {}


def query_groups(args: MegatronArguments) -> dict[str, int]:
    grouped = args.get("group_query_attention", False)
    return {"num_query_groups": int(args.need("num_query_groups"))} if grouped else {}


def position_type(args: MegatronArguments) -> str:
    kind = args.get("position_embedding_type", LEARNED)
    if args.get("use_rotary_position_embeddings", False):
        # --use-rotary-position-embeddings is the older option; it wins over position_embedding_type.
        return "rope"
    return "none" if kind == LEARNED and not args.get("add_position_embedding", True) else str(kind)


def positions(args: MegatronArguments, allowed: tuple[str, ...]) -> str:
    kind = position_type(args)
    if kind not in allowed:
        raise ConfigError(
            f"{args.origin}: position_embedding_type={kind!r} is not read; it can be {', '.join(allowed)}"
        )
    return kind


def normalization(args: MegatronArguments) -> str:
    kind = args.get("normalization", "LayerNorm")
    if kind not in ("LayerNorm", "RMSNorm"):
        raise ConfigError(f"{args.origin}: normalization={kind!r} is not read; it can be LayerNorm or RMSNorm")
    return str(kind)


def need_values(args: MegatronArguments, what: str, values: Mapping[str, tuple[Any, Any]]) -> None:
    """values: argument -> (Megatron's default, what a family takes for granted).

    Raises ConfigError, naming the argument and the family, for another value.
    """
    for name, (default, wanted) in values.items():
        value = args.get(name, default)
        if value != wanted:
            raise ConfigError(f"{args.origin}: {name}={value!r} is not read of {what}; it can be {wanted!r}")


def mtp_section(args: MegatronArguments) -> dict[str, Any]:
    """Layers of multi-token prediction, where there are any."""
    if not (depth := int(args.get("mtp_num_layers", None) or 0)):
        return {}
    return {"mtp_num_layers": depth, "mtp_loss_scaling_factor": float(args.get("mtp_loss_scaling_factor", 0.1))}


STREAMS: Mapping[str, tuple[str, Any]] = {
    "mhc_num_residual_streams": ("num_residual_streams", 4),
    "mhc_sinkhorn_iterations": ("mhc_sinkhorn_iterations", 20),
    "mhc_init_gating_factor": ("mhc_init_gating_factor", 0.01),
}
"""Key, which is an argument of the same name -> its older name, and the default of both."""
CONNECTS = ("enable_mhc_connections", "enable_hyper_connections")
"""The argument that turns hyper-connections on, and its older name."""


def connects_streams(args: MegatronArguments) -> bool:
    return any(args.get(name, False) for name in CONNECTS)


def stream_section(args: MegatronArguments) -> dict[str, Any]:
    """Hyper-connections between residual streams, where there are any. Raises ConfigError for their variant in one
    pass."""
    if not connects_streams(args):
        return {}
    if args.get("mhc_single_pass", False):
        raise ConfigError(
            f"{args.origin}: mhc_single_pass=True is not read: a block that reads streams by the weights of the block "
            "before it; it can be False"
        )
    # The older name counts only in files without the other.
    values = {key: args.get(key, args.get(older, default)) for key, (older, default) in STREAMS.items()}
    if args.get(CONNECTS[1], False) and args.get("num_residual_streams", None) is not None:
        values["mhc_num_residual_streams"] = args.values["num_residual_streams"]
    return {"enable_mhc_connections": True, **values}


# -- write -------------------------------------------------------------------------------------------


def stream_arguments(model: Any) -> dict[str, Any]:
    """The other way; nothing for a model with one residual stream."""
    if not model.enable_mhc_connections:
        return {}
    # Under both names of each: which one a version reads is not known from its number.
    values = {name: getattr(model, key) for key, (older, _) in STREAMS.items() for name in (key, older)}
    return {**dict.fromkeys(CONNECTS, True), **values}


def shared_arguments(model: Any) -> dict[str, Any]:
    """Arguments of the families with attention."""
    require(model, "activation", tuple(ACTIVATIONS))
    grouped = model.query_groups != model.num_attention_heads
    return {
        **initial_arguments(model),
        "ffn_hidden_size": model.ffn_size,
        "num_attention_heads": model.num_attention_heads,
        "kv_channels": model.head_dim,
        "group_query_attention": grouped,
        # Megatron reads num_query_groups with group_query_attention only; 1 is its default.
        "num_query_groups": model.query_groups if grouped else 1,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        **PLAIN_GELU,
        **ACTIVATIONS[model.activation],
    }


def initial_arguments(model: Any) -> dict[str, Any]:
    """Arguments of all families, and that a model is none of the kinds that only some are."""
    return {
        "hidden_size": model.hidden_size,
        "normalization": model.normalization,
        "softmax_type": "vanilla",
        "norm_epsilon": model.norm_epsilon,
        "layernorm_epsilon": model.norm_epsilon,
        "init_method_std": model.init_method_std,
        "apply_layernorm_1p": False,
        "layernorm_zero_centered_gamma": False,
        "vocab_size": model.vocab_size,
        "num_experts": None,
        "multi_latent_attention": False,
        "mtp_num_layers": None,
        "is_hybrid_model": False,
        "hybrid_layer_pattern": None,
        "hybrid_override_pattern": None,
    }


def depth_arguments(model: Any) -> dict[str, Any]:
    return {"num_layers": model.num_layers, "encoder_num_layers": model.num_layers}


def position_arguments(kind: str) -> dict[str, Any]:
    return {
        "position_embedding_type": kind,
        "use_rotary_position_embeddings": False,
    }


def require(model: Any, key: str, allowed: tuple[Any, ...]) -> None:
    """Raises ConfigError, naming the key, unless the model has one of the values that Megatron can say."""
    actual = getattr(model, key)
    if actual not in allowed:
        legal = ", ".join(str(value) for value in allowed)
        raise ConfigError(f"model.{key}={actual} cannot be written as Megatron's arguments; it can be {legal}")


# -- sliding windows: window_size and window_attn_skip_freq, and the window of each layer ------------

SKIPPED = "window_attn_skip_freq"


def windows_of(args: MegatronArguments, num_layers: int) -> list[int | None]:
    """Positions of each layer that a query sees, itself included; None: everything before it.

    Megatron's window_size counts those before the query and those after it, -1 for all; window_attn_skip_freq is None
    (all layers have the window), n (every n-th has none), or a 1 for each layer that has it. Raises ConfigError.
    """
    window = args.values.get("window_size")
    if window is None:
        return [None] * num_layers
    if len(window) != 2 or window[1] not in (0, -1):
        raise ConfigError(f"{args.origin}: window_size={window!r} is not read; it can be (left, 0)")
    # Megatron's left counts positions before the query: left 127 is a window of 128 with the query.
    size = int(window[0]) + 1 if window[0] >= 0 else None
    return [size if has_it else None for has_it in _layers_with_window(args, num_layers)]


def _layers_with_window(args: MegatronArguments, num_layers: int) -> list[bool]:
    skipped = args.values.get(SKIPPED)
    if skipped is None:
        return [True] * num_layers
    if isinstance(skipped, str):
        return read_pattern(skipped, num_layers, SKIPPED)
    if isinstance(skipped, list | tuple) and len(skipped) == num_layers:
        return [bool(entry) for entry in skipped]
    if isinstance(skipped, int) and skipped > 0:
        # Megatron numbers layers from 1 here: with n = 4 the layers 4, 8, ... (3, 7, ... from 0) have no window.
        return [(layer + 1) % skipped != 0 for layer in range(num_layers)]
    raise ConfigError(
        f"{args.origin}: {SKIPPED}={skipped!r} is not read; it can be None, a number above 0, or a list with an entry "
        f"for each of the {num_layers} layers"
    )


def window_arguments(model: Any) -> dict[str, Any]:
    """The same of our model. Raises ConfigError for windows of several sizes, which no argument says."""
    windows = [model.window_of(layer) for layer in range(model.num_layers)]
    sizes = {window for window in windows if window is not None}
    if len(sizes) > 1:
        raise ConfigError(
            f"model.family={model.family} with windows of {' and '.join(map(str, sorted(sizes)))} positions cannot be "
            "written as Megatron's arguments, which have one size"
        )
    if not sizes:
        return {"window_size": None, SKIPPED: None}
    return {"window_size": (sizes.pop() - 1, 0), SKIPPED: _skipped([window is not None for window in windows])}


def _skipped(layers: Sequence[bool]) -> int | list[int] | None:
    """A number where one says it, else a list."""
    if all(layers):
        return None
    # n = len(layers): only the last layer has none.
    for every in range(2, len(layers) + 1):
        if list(layers) == [(layer + 1) % every != 0 for layer in range(len(layers))]:
            return every
    return [int(has_it) for has_it in layers]


# -- YaRN: rotary positions stretched for longer sequences (Peng et al., 2023) -----------------------
#
# Attention with heads has --position-embedding-type yarn and says everything; latent attention has --rope-type yarn and
# takes some of it for granted. The two mscale arguments are the same for both.

YARN = "yarn"
PLAIN = (1.0, 0.0)
"""mscale and mscale_all_dim that mean what our configuration does without rope_mscale keys: m(1)."""


def yarn_section(args: MegatronArguments) -> dict[str, Any]:
    """Keys for position_embedding_type yarn, whose arguments Megatron has no defaults for."""
    return {
        "rope_scaling_type": YARN,
        "rope_scaling_factor": float(args.get("rotary_scaling_factor", 1.0)),
        "original_max_position_embeddings": int(args.need("yarn_original_max_position_embeddings")),
        "rope_beta_fast": float(args.need("yarn_beta_fast")),
        "rope_beta_slow": float(args.need("yarn_beta_slow")),
        "rope_truncate": bool(args.need("yarn_correction_range_round_to_int")),
        **mscale_section(args),
    }


def mscale_section(args: MegatronArguments) -> dict[str, Any]:
    """Megatron's factor is m(mscale) / m(mscale_all_dim) always; ours only with both above 0, else m(1)."""
    # m(x) = 0.1 x ln(factor) + 1, and m(0) = 1.
    factors = float(args.get("mscale", PLAIN[0])), float(args.get("mscale_all_dim", PLAIN[1]))
    if factors == PLAIN:
        return {}
    if not all(factors):
        raise ConfigError(
            f"{args.origin}: mscale={factors[0]:g} with mscale_all_dim={factors[1]:g} is not read; both have to be "
            "above 0, or they have to be 1 and 0"
        )
    return {"rope_mscale": factors[0], "rope_mscale_all_dim": factors[1]}


def yarn_arguments(model: Any) -> dict[str, Any]:
    """The other way. Raises ConfigError for a factor on queries and keys that is given as such."""
    require(model, "rope_attention_factor", (None,))
    return {
        "rotary_scaling_factor": model.rope_scaling_factor,
        "yarn_original_max_position_embeddings": model.original_max_position_embeddings
        or model.max_position_embeddings,
        "yarn_beta_fast": model.rope_beta_fast,
        "yarn_beta_slow": model.rope_beta_slow,
        "yarn_correction_range_round_to_int": model.rope_truncate,
        **mscale_arguments(model),
    }


def mscale_arguments(model: Any) -> dict[str, Any]:
    rope_mscale, all_dim = model.rope_mscale, model.rope_mscale_all_dim
    if all_dim and not rope_mscale:
        raise ConfigError(
            f"model.rope_mscale_all_dim={all_dim} without model.rope_mscale cannot be written as Megatron's arguments; "
            "set model.rope_mscale too"
        )
    # Without both, ours multiplies by m(1): Megatron's m(1) / m(0).
    mscale, mscale_all_dim = (rope_mscale, all_dim) if rope_mscale and all_dim else PLAIN
    return {"mscale": mscale, "mscale_all_dim": mscale_all_dim}


# -- MoE: the moe_* arguments and the options under [model.moe] --------------------------------------

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
    "moe_apply_probs_on_input": False,
}
"""Arguments that are options of the same name and meaning, with Megatron's defaults."""
BIAS_RATE = "moe_router_bias_update_rate"
COEFFICIENT = 0.01
"""The default of our configuration for what a balance loss counts."""


def moe_section(args: MegatronArguments) -> dict[str, Any]:
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


def _frequency(args: MegatronArguments) -> int | str:
    frequency = args.get("moe_layer_freq", 1)
    return (
        str([int(entry) for entry in frequency]).replace(" ", "") if isinstance(frequency, list | tuple) else frequency
    )


def _balancing(args: MegatronArguments) -> dict[str, Any]:
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
        "moe_router_weight_epsilon": 1e-20,
        "moe_aux_loss_score_function": options.get("moe_router_score_function", "softmax"),
    }
    for key, meant in derived.items():
        if options.get(key) not in (None, meant):
            raise ConfigError(
                f"model.moe.{key}={options[key]} cannot be written as Megatron's arguments, which mean {meant}; "
                "leave it out"
            )
    has_softmax = options.get("moe_router_score_function", "softmax") == "softmax"
    if has_softmax and options.get("moe_router_enable_expert_bias"):
        raise ConfigError(
            "model.moe.moe_router_enable_expert_bias=true cannot be written as Megatron's arguments with "
            "model.moe.moe_router_score_function=softmax; Megatron has the bias with sigmoid scores"
        )
    shared = options.get("moe_shared_expert_intermediate_size")
    if shared and model.add_bias_linear:
        raise ConfigError(
            f"model.moe.moe_shared_expert_intermediate_size={shared} of a model with biases in its linear layers: "
            "Megatron refuses to build it; its shared experts have no biases"
        )


def _pattern(model: Any, parameters: Collection[str]) -> int | list[int]:
    # Layers whose names have a router have experts: the parameters say it for frequencies and lists alike.
    router = re.compile(r"^decoder\.layers\.(\d+)\.mlp\.router\.")
    with_experts = {int(match[1]) for name in parameters if (match := router.match(name))}
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
