"""Megatron's arguments for decoders; those of Llama-like families (RMSNorm, SwiGLU, rotary positions on whole heads),
which differ in few arguments and share one reader."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mt_core.config_map import MegatronArguments, MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.megatron import (
    CONNECTS,
    YARN,
    depth_arguments,
    head_size,
    kind_of_model,
    moe_arguments,
    moe_section,
    position_arguments,
    position_type,
    positions,
    query_groups,
    require,
    shared_arguments,
    shared_section,
    window_arguments,
    windows_of,
    yarn_arguments,
    yarn_section,
)

VALUES: Mapping[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "hidden_dropout": 0.0,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
}
"""Arguments that Hugging Face's formats of these families have too."""
DEFAULTS: Mapping[str, Any] = {"normalization": "LayerNorm", "swiglu": False, "hidden_dropout": 0.1}
"""Megatron's own, where they are others."""
EXTRAS: Mapping[str, Any] = {"use_rope_scaling": False, "window_size": None, "rotary_seq_len_interpolation_factor": 1}
"""Arguments that only these families read -> what turns them off."""
LLAMA3: Mapping[str, Any] = {
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Constants of Megatron's use_rope_scaling."""


def differing(args: MegatronArguments) -> list[str]:
    """Arguments that exclude a decoder from these families."""
    names = [name for name, value in VALUES.items() if args.get(name, DEFAULTS.get(name, value)) != value]
    if position_type(args) not in ("rope", YARN):
        names.append("position_embedding_type")
    names += [name for name in ("use_mup", "mtp_num_layers", *CONNECTS) if args.get(name, None)]
    # None of these families has biases everywhere together with normalized heads or windows.
    if args.get("add_bias_linear", True) and (args.get("qk_layernorm", False) or args.values.get("window_size")):
        names.append("add_bias_linear")
    return names


NEIGHBOURS_WITH = ("qk_l2_norm", "no_rope_freq", "use_rope_scaling")
"""Arguments of a decoder that rotates pairs of neighbours, of which the family gpt has none."""


def rotates_neighbours(args: MegatronArguments) -> bool:
    """Whether it is Llama 4's decoder: with experts, and one of Llama's but that it rotates pairs of neighbours."""
    halves = MegatronArguments({**args.values, "rotary_interleaved": False}, args.origin)
    return (
        bool(args.get("rotary_interleaved", False) and args.get("num_experts", 0))
        and any(args.get(name) for name in NEIGHBOURS_WITH)
        and not differing(halves)
    )


def require_no_extras(args: MegatronArguments, differing: Collection[str]) -> None:
    """Raises ConfigError when a decoder of another family has an argument that only these read."""
    for name, off in EXTRAS.items():
        if args.get(name, off) != off:
            wanted = ", ".join(f"{key}={value}" for key, value in VALUES.items())
            raise ConfigError(
                f"{args.origin}: {name}={args.values[name]!r} is read of models with rotary positions, {wanted}; "
                f"this one has {', '.join(f'{key}={args.values.get(key)}' for key in differing)}"
            )


def depth_and_heads(args: MegatronArguments) -> dict[str, Any]:
    return {
        "num_layers": _num_layers(args),
        **head_size(args),
        "untie_embeddings_and_output_weights": args.untied,
        **moe_section(args),
        **query_groups(args),
    }


def rotary_decoder_section(args: MegatronArguments) -> dict[str, Any]:
    """What decoders with rotary positions on whole heads share."""
    positions(args, ("rope", YARN))
    return {
        **shared_section(args),
        **depth_and_heads(args),
        "max_position_embeddings": int(args.need("max_position_embeddings")),
        "rotary_base": float(args.get("rotary_base", 10000)),
        **(yarn_section(args) if position_type(args) == YARN else _rope_scaling(args)),
    }


def rotary_family(args: MegatronArguments) -> str:
    """The family that has the features that the arguments enable, and no others."""
    # The same decoder would be several families. The choice is the narrowest that has all that is enabled: experts
    # first, then biases or norms on heads, then windows.
    experts, biased = bool(args.get("num_experts", 0)), bool(args.get("add_qkv_bias", False))
    own_attention = biased or bool(args.get("qk_layernorm", False))
    if args.get("add_bias_linear", True):
        return "llama"
    if experts and (own_attention or args.get("moe_shared_expert_intermediate_size", 0)):
        return "qwen_moe"
    if experts:
        return "mixtral"
    if own_attention:
        return "qwen"
    return "mistral" if any(windows_of(args, _num_layers(args))) else "llama"


def rotary_section(args: MegatronArguments, names: Collection[str]) -> dict[str, Any]:
    """Keys of the family that `rotary_family` names."""
    family, section = rotary_family(args), rotary_decoder_section(args)
    if args.get("add_bias_linear", True):
        return {**section, "attention_bias": True, "mlp_bias": True}
    windows = windows_of(args, section["num_layers"])
    if family in ("qwen", "qwen_moe"):
        section["add_qkv_bias"] = bool(args.get("add_qkv_bias", False))
        section["qk_layernorm"] = bool(args.get("qk_layernorm", False))
    if family == "qwen":
        return {**section, **_windows_behind(args, windows)}
    if family == "qwen_moe" and any(windows):
        raise ConfigError(
            f"{args.origin}: window_size={args.values['window_size']!r} is not read of an MoE model with shared "
            "experts, biases on queries or normalized heads; it can be None"
        )
    return {**section, "sliding_window": _window_of_all(args, windows)} if family in ("mistral", "mixtral") else section


def _num_layers(args: MegatronArguments) -> int:
    return int(args.need("num_layers", "encoder_num_layers"))


def _rope_scaling(args: MegatronArguments) -> dict[str, Any]:
    """Llama 3.1's, whose constants but the factor Megatron fixes, or a division of all positions."""
    factor = args.get("rotary_seq_len_interpolation_factor", 1)
    if args.get("use_rope_scaling", False):
        return {
            "rope_scaling_type": "llama3",
            "rope_scaling_factor": float(args.get("rope_scaling_factor", 8.0)),
            **LLAMA3,
        }
    return {} if factor == 1 else {"rope_scaling_type": "linear", "rope_scaling_factor": float(factor)}


def _window_of_all(args: MegatronArguments, windows: Sequence[int | None]) -> int | None:
    if len(set(windows)) > 1:
        raise ConfigError(f"{_windows_given(args)} is not read of this model, where every layer needs the window")
    return windows[0]


def _windows_behind(args: MegatronArguments, windows: Sequence[int | None]) -> dict[str, int]:
    """Qwen's windows, in all layers behind the first so many."""
    # max_window_layers = n: layers 0 to n - 1 see everything.
    first = next((layer for layer, window in enumerate(windows) if window is not None), len(windows))
    if len(set(windows[first:])) > 1:
        raise ConfigError(
            f"{_windows_given(args)} is not read of this model, where the first so many layers have no window "
            "and all others have it"
        )
    if first == len(windows):
        return {}
    window = windows[first]
    assert window is not None
    return {"sliding_window": window} | ({"max_window_layers": first} if first else {})


def _windows_given(args: MegatronArguments) -> str:
    skipped = args.values.get("window_attn_skip_freq")
    return f"{args.origin}: window_size={args.values['window_size']!r} with window_attn_skip_freq={skipped!r}"


def rotary_arguments(model: Any, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    if getattr(model, "attention_bias", False) != getattr(model, "mlp_bias", False):
        raise ConfigError(
            f"model.attention_bias={model.attention_bias} with model.mlp_bias={model.mlp_bias} cannot be written as "
            "Megatron's arguments, where all linear layers have biases or none; they have to be equal"
        )
    if getattr(model, "mtp_num_layers", 0):
        raise ConfigError(
            f"model.mtp_num_layers={model.mtp_num_layers} cannot be written as Megatron's arguments of this family, "
            "which are read as a gpt; it can be 0"
        )
    return {
        **decoder_arguments(model, parameters),
        "max_position_embeddings": model.max_position_embeddings,
        "rotary_base": model.rotary_base,
        "rotary_percent": getattr(model, "rotary_percent", 1.0),
        "rotary_interleaved": False,
        **_position_arguments(model),
    }


def rotary_map(family: str) -> MegatronMap:
    """The declaration of a family whose decoder is Llama's but for biases, norms of heads, windows and experts."""

    def takes(args: MegatronArguments, names: Collection[str]) -> bool:
        return kind_of_model(args, names) == "decoder" and not differing(args) and rotary_family(args) == family

    return MegatronMap(arguments=rotary_arguments, takes=takes, section=rotary_section)


def _position_arguments(model: Any) -> dict[str, Any]:
    require(model, "rope_scaling_type", ("none", "linear", "llama3", YARN))
    if model.rope_scaling_type == YARN:
        unscaled = {"use_rope_scaling": False, "rotary_seq_len_interpolation_factor": None}
        return {**position_arguments(YARN), **unscaled, **yarn_arguments(model)}
    return {**position_arguments("rope"), **_rope_scaling_arguments(model)}


def _rope_scaling_arguments(model: Any) -> dict[str, Any]:
    if model.rope_scaling_type != "llama3":
        return {"use_rope_scaling": False, "rotary_seq_len_interpolation_factor": model.rope_scaling_factor}
    for key, value in LLAMA3.items():
        actual = getattr(model, key)
        if key == "original_max_position_embeddings":
            actual = actual or model.max_position_embeddings
        if actual != value:
            raise ConfigError(
                f"model.{key}={actual} cannot be written as Megatron's arguments, which fix it at {value}"
            )
    return {
        "use_rope_scaling": True,
        "rope_scaling_factor": model.rope_scaling_factor,
        "rotary_seq_len_interpolation_factor": None,
    }


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
