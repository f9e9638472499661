"""What several families share: Megatron's arguments as keys of [model], and those keys as arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_ckpt.megatron.arguments import Arguments
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
