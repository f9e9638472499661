"""Llama and its relatives: RMSNorm, SwiGLU and full rotary positions; with experts Mixtral, Qwen-MoE, Granite-MoE."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mt_ckpt.megatron.arguments import Arguments
from mt_ckpt.megatron.families.gpt import decoder_arguments, depth_and_heads
from mt_ckpt.megatron.families.shared import (
    ACTIVATIONS,
    YARN,
    need_values,
    position_arguments,
    position_type,
    positions,
    require,
    shared_section,
    windows_of,
    yarn_arguments,
    yarn_section,
)
from mt_core.config.layer_pattern import pattern_of
from mt_core.errors import ConfigError

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
NEUTRAL: Mapping[str, Any] = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
"""Granite's factors, when they change nothing."""


def differing(args: Arguments) -> list[str]:
    """Arguments that exclude a decoder from these families."""
    found = [name for name, value in VALUES.items() if args.get(name, DEFAULTS.get(name, value)) != value]
    if position_type(args) not in ("rope", YARN):
        found.append("position_embedding_type")
    # None of these families has biases everywhere together with normalized heads or windows.
    if args.get("add_bias_linear", True) and (args.get("qk_layernorm", False) or args.values.get("window_size")):
        found.append("add_bias_linear")
    return found


def require_no_extras(args: Arguments, differing: Collection[str]) -> None:
    """Raises ConfigError when a decoder of another family has an argument that only these read."""
    for name, off in EXTRAS.items():
        if args.get(name, off) != off:
            wanted = ", ".join(f"{key}={value}" for key, value in VALUES.items())
            raise ConfigError(
                f"{args.origin}: {name}={args.values[name]!r} is read of models with rotary positions, {wanted}; "
                f"this one has {', '.join(f'{key}={args.values.get(key)}' for key in differing)}"
            )


def rotary_decoder_section(args: Arguments) -> dict[str, Any]:
    """What decoders with rotary positions on whole heads share."""
    positions(args, ("rope", YARN))
    return {
        **shared_section(args),
        **depth_and_heads(args),
        "max_position_embeddings": int(args.need("max_position_embeddings")),
        "rotary_base": float(args.get("rotary_base", 10000)),
        **(yarn_section(args) if position_type(args) == YARN else _rope_scaling(args)),
    }


def rotary_section(args: Arguments) -> dict[str, Any]:
    """The family that has the features that the arguments enable, and no others."""
    section = rotary_decoder_section(args)
    if args.get("add_bias_linear", True):
        return {"family": "llama", **section, "attention_bias": True, "mlp_bias": True}
    # The same decoder would be several families. The choice is the narrowest that has all that is enabled: experts
    # first, then biases or norms on heads, then windows.
    windows, experts = windows_of(args, section["num_layers"]), "moe" in section
    biased, normalized = bool(args.get("add_qkv_bias", False)), bool(args.get("qk_layernorm", False))
    if experts and (biased or normalized or args.get("moe_shared_expert_intermediate_size", 0)):
        if any(windows):
            raise ConfigError(
                f"{args.origin}: window_size={args.values['window_size']!r} is not read of an MoE model with shared "
                "experts, biases on queries or normalized heads; it can be None"
            )
        return {"family": "qwen_moe", **section, "add_qkv_bias": biased, "qk_layernorm": normalized}
    if experts:
        return {"family": "mixtral", **section, "sliding_window": _window_of_all(args, windows)}
    if biased or normalized:
        own = {"add_qkv_bias": biased, "qk_layernorm": normalized, **_windows_behind(args, windows)}
        return {"family": "qwen", **section, **own}
    if any(windows):
        return {"family": "mistral", **section, "sliding_window": _window_of_all(args, windows)}
    return {"family": "llama", **section}


def _rope_scaling(args: Arguments) -> dict[str, Any]:
    """Llama 3.1's, whose constants but the factor Megatron fixes, or a division of all positions."""
    factor = args.get("rotary_seq_len_interpolation_factor", 1)
    if args.get("use_rope_scaling", False):
        return {
            "rope_scaling_type": "llama3",
            "rope_scaling_factor": float(args.get("rope_scaling_factor", 8.0)),
            **LLAMA3,
        }
    return {} if factor == 1 else {"rope_scaling_type": "linear", "rope_scaling_factor": float(factor)}


def _window_of_all(args: Arguments, windows: Sequence[int | None]) -> int | None:
    if len(set(windows)) > 1:
        raise ConfigError(f"{_windows_given(args)} is not read of this model, where every layer needs the window")
    return windows[0]


def _windows_behind(args: Arguments, windows: Sequence[int | None]) -> dict[str, int]:
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


def _windows_given(args: Arguments) -> str:
    skipped = args.values.get("window_attn_skip_freq")
    return f"{args.origin}: window_size={args.values['window_size']!r} with window_attn_skip_freq={skipped!r}"


def rotary_arguments(model: Any, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    if getattr(model, "attention_bias", False) != getattr(model, "mlp_bias", False):
        raise ConfigError(
            f"model.attention_bias={model.attention_bias} with model.mlp_bias={model.mlp_bias} cannot be written as "
            "Megatron's arguments, where all linear layers have biases or none; they have to be equal"
        )
    return {
        **decoder_arguments(model, parameters),
        "max_position_embeddings": model.max_position_embeddings,
        "rotary_base": model.rotary_base,
        "rotary_percent": getattr(model, "rotary_percent", 1.0),
        "rotary_interleaved": False,
        **_position_arguments(model),
    }


def granite_arguments(model: Any, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Granite's factors have no arguments; a model without them is a Mixtral."""
    for key, neutral in NEUTRAL.items():
        require(model, key, (neutral,))
    # None: head_dim ** -0.5 by default.
    require(model, "attention_multiplier", (None, model.head_dim**-0.5))
    return rotary_arguments(model, parameters, kept)


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
        given = getattr(model, key)
        if key == "original_max_position_embeddings":
            given = given or model.max_position_embeddings
        if given != value:
            raise ConfigError(f"model.{key}={given} cannot be written as Megatron's arguments, which fix it at {value}")
    return {
        "use_rope_scaling": True,
        "rope_scaling_factor": model.rope_scaling_factor,
        "rotary_seq_len_interpolation_factor": None,
    }


# GPT-OSS: MoE with attention sinks, a clamped SwiGLU, biases everywhere and sliding windows in some layers.

SOFTMAX, LEARNABLE = "softmax_type", "learnable"
READ = (SOFTMAX, *ACTIVATIONS["clamped_swiglu"])
"""Arguments that other families need off."""
GRANTED: Mapping[str, tuple[Any, Any]] = {
    "normalization": ("LayerNorm", "RMSNorm"),
    "swiglu": (False, False),
    "quick_geglu": (False, True),
    "glu_linear_offset": (0.0, 1.0),
    "activation_func_clamp_value": (None, 7.0),
    "add_bias_linear": (True, True),
    "qk_layernorm": (False, False),
    "hidden_dropout": (0.1, 0.0),
    "rotary_percent": (1.0, 1.0),
    "rotary_interleaved": (False, False),
}


def has_sinks(args: Arguments) -> bool:
    """Whether each head has a learned attention sink."""
    return bool(args.get(SOFTMAX) == LEARNABLE)


def gpt_oss_section(args: Arguments) -> dict[str, Any]:
    need_values(args, "a model with attention sinks", GRANTED)
    section = rotary_decoder_section(args)
    if "moe" not in section:
        raise ConfigError(
            f"{args.origin}: {SOFTMAX}={LEARNABLE!r} is read of mixtures of experts; num_experts has to be set"
        )
    return {"family": "gpt_oss", **section, **_windows(args, section["num_layers"])}


def _windows(args: Arguments, num_layers: int) -> dict[str, Any]:
    windows = windows_of(args, num_layers)
    # `windows_of` gives one size or None for each layer, so there is at most one.
    sizes = {window for window in windows if window is not None}
    if not sizes:
        return {"window_attn_skip_freq": 1}
    given = args.values.get("window_attn_skip_freq")
    pattern = given if isinstance(given, int) else pattern_of([window is not None for window in windows])
    return {"sliding_window": sizes.pop(), "window_attn_skip_freq": pattern}


def gpt_oss_arguments(model: Any, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    return {**rotary_arguments(model, parameters, kept), SOFTMAX: LEARNABLE}
