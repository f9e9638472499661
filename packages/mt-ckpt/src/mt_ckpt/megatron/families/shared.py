"""What several families share: Megatron's arguments as keys of [model], and those keys as arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mt_ckpt.megatron.arguments import Arguments
from mt_core.config.layer_pattern import read_pattern
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


# -- read --------------------------------------------------------------------------------------------


def shared_section(args: Arguments) -> dict[str, Any]:
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


def initial_section(args: Arguments) -> dict[str, Any]:
    """What all families have, with or without attention."""
    return {
        "init_method_std": float(args.get("init_method_std", 0.02)),
        "make_vocab_size_divisible_by": int(args.get("make_vocab_size_divisible_by", 128)),
    }


def norm_epsilon(args: Arguments) -> float:
    return float(args.get("norm_epsilon", args.get("layernorm_epsilon", 1e-5)))


def activation(args: Arguments) -> str:
    """Megatron's fused bias and GELU is the tanh approximation, whatever `openai_gelu` says."""
    if args.get("swiglu", False):
        return "swiglu"
    if args.get("squared_relu", False):
        return "squared_relu"
    # The fused kernel adds the bias of a linear layer, so it is used only where there is one.
    fused = args.get("bias_gelu_fusion", False) and args.get("add_bias_linear", True)
    return "gelu_tanh" if fused or args.get("openai_gelu", False) else "gelu"


def head_size(args: Arguments) -> dict[str, int]:
    """kv_channels, where it is not what our families take for it."""
    size = int(args.need("hidden_size")) // int(args.need("num_attention_heads"))
    given = int(args.get("kv_channels", size))
    return {"kv_channels": given} if given != size else {}


def query_groups(args: Arguments) -> dict[str, int]:
    grouped = args.get("group_query_attention", False)
    return {"num_query_groups": int(args.need("num_query_groups"))} if grouped else {}


def position_type(args: Arguments) -> str:
    given = args.get("position_embedding_type", LEARNED)
    if args.get("use_rotary_position_embeddings", False):
        # --use-rotary-position-embeddings is the older option; it wins over position_embedding_type.
        return "rope"
    return "none" if given == LEARNED and not args.get("add_position_embedding", True) else str(given)


def positions(args: Arguments, allowed: tuple[str, ...]) -> str:
    given = position_type(args)
    if given not in allowed:
        raise ConfigError(
            f"{args.origin}: position_embedding_type={given!r} is not read; it can be {', '.join(allowed)}"
        )
    return given


def normalization(args: Arguments) -> str:
    given = args.get("normalization", "LayerNorm")
    if given not in ("LayerNorm", "RMSNorm"):
        raise ConfigError(f"{args.origin}: normalization={given!r} is not read; it can be LayerNorm or RMSNorm")
    return str(given)


def need_values(args: Arguments, what: str, values: Mapping[str, tuple[Any, Any]]) -> None:
    """values: argument -> (Megatron's default, what a family takes for granted).

    Raises ConfigError, naming the argument and the family, for another value.
    """
    for name, (default, wanted) in values.items():
        given = args.get(name, default)
        if given != wanted:
            raise ConfigError(f"{args.origin}: {name}={given!r} is not read of {what}; it can be {wanted!r}")


# -- write -------------------------------------------------------------------------------------------


def shared_arguments(model: Any) -> dict[str, Any]:
    """Of the families with attention."""
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
    """Of all families, and that a model is none of the kinds that only some are."""
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
    given = getattr(model, key)
    if given not in allowed:
        legal = ", ".join(str(value) for value in allowed)
        raise ConfigError(f"model.{key}={given} cannot be written as Megatron's arguments; it can be {legal}")


# Sliding windows: Megatron's window_size and window_attn_skip_freq, and the window of each of our layers.

SKIPPED = "window_attn_skip_freq"


def windows_of(args: Arguments, num_layers: int) -> list[int | None]:
    """Of each layer the positions that a query sees, itself included; None: everything before it.

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


def _layers_with_window(args: Arguments, num_layers: int) -> list[bool]:
    given = args.values.get(SKIPPED)
    if given is None:
        return [True] * num_layers
    if isinstance(given, str):
        return read_pattern(given, num_layers, SKIPPED)
    if isinstance(given, list | tuple) and len(given) == num_layers:
        return [bool(entry) for entry in given]
    if isinstance(given, int) and given > 0:
        # Megatron numbers layers from 1 here: with n = 4 the layers 4, 8, ... (3, 7, ... from 0) have no window.
        return [(layer + 1) % given != 0 for layer in range(num_layers)]
    raise ConfigError(
        f"{args.origin}: {SKIPPED}={given!r} is not read; it can be None, a number above 0, or a list with an entry "
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


# YaRN: rotary positions stretched for longer sequences (Peng et al., 2023), as Megatron's arguments say it.
#
# Attention with heads has --position-embedding-type yarn and says everything; latent attention has --rope-type yarn and
# takes some of it for granted. The two mscale arguments are the same for both.

YARN = "yarn"
PLAIN = (1.0, 0.0)
"""mscale and mscale_all_dim that mean what our configuration does without rope_mscale keys: m(1)."""


def yarn_section(args: Arguments) -> dict[str, Any]:
    """Of position_embedding_type yarn, whose arguments Megatron has no defaults for."""
    return {
        "rope_scaling_type": YARN,
        "rope_scaling_factor": float(args.get("rotary_scaling_factor", 1.0)),
        "original_max_position_embeddings": int(args.need("yarn_original_max_position_embeddings")),
        "rope_beta_fast": float(args.need("yarn_beta_fast")),
        "rope_beta_slow": float(args.need("yarn_beta_slow")),
        "rope_truncate": bool(args.need("yarn_correction_range_round_to_int")),
        **mscale_section(args),
    }


def mscale_section(args: Arguments) -> dict[str, Any]:
    """Megatron's factor is m(mscale) / m(mscale_all_dim) always; ours only with both above 0, else m(1)."""
    # m(x) = 0.1 x ln(factor) + 1, and m(0) = 1.
    given = float(args.get("mscale", PLAIN[0])), float(args.get("mscale_all_dim", PLAIN[1]))
    if given == PLAIN:
        return {}
    if not all(given):
        raise ConfigError(
            f"{args.origin}: mscale={given[0]:g} with mscale_all_dim={given[1]:g} is not read; both have to be above "
            "0, or they have to be 1 and 0"
        )
    return {"rope_mscale": given[0], "rope_mscale_all_dim": given[1]}


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
    one, all_dim = model.rope_mscale, model.rope_mscale_all_dim
    if all_dim and not one:
        raise ConfigError(
            f"model.rope_mscale_all_dim={all_dim} without model.rope_mscale cannot be written as Megatron's arguments; "
            "set model.rope_mscale too"
        )
    # Without both, ours multiplies by m(1): Megatron's m(1) / m(0).
    mscale, mscale_all_dim = (one, all_dim) if one and all_dim else PLAIN
    return {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
