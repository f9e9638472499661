"""Megatron's arguments for GPT-OSS: attention sinks, a clamped SwiGLU, biases everywhere, windows in some layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mt_core.config.layer_pattern import pattern_of
from mt_core.config_map import MegatronArguments, MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.megatron import ACTIVATIONS, LEARNABLE, SOFTMAX, kind_of_model, need_values, windows_of
from mt_models.blocks.megatron_decoder import rotary_arguments, rotary_decoder_section

READS = (SOFTMAX, *ACTIVATIONS["clamped_swiglu"])
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


def has_sinks(args: MegatronArguments, names: Collection[str]) -> bool:
    """Whether each head has a learned attention sink."""
    return kind_of_model(args, names) == "sinks"


def gpt_oss_section(args: MegatronArguments, names: Collection[str]) -> dict[str, Any]:
    need_values(args, "a model with attention sinks", GRANTED)
    keys = rotary_decoder_section(args)
    if "moe" not in keys:
        raise ConfigError(
            f"{args.origin}: {SOFTMAX}={LEARNABLE!r} is read of mixtures of experts; num_experts has to be set"
        )
    return {**keys, **_windows(args, keys["num_layers"])}


def _windows(args: MegatronArguments, num_layers: int) -> dict[str, Any]:
    windows = windows_of(args, num_layers)
    # `windows_of` gives one size or None for each layer, so there is at most one.
    sizes = {window for window in windows if window is not None}
    if not sizes:
        return {"window_attn_skip_freq": 1}
    skip_freq = args.values.get("window_attn_skip_freq")
    pattern = skip_freq if isinstance(skip_freq, int) else pattern_of([window is not None for window in windows])
    return {"sliding_window": sizes.pop(), "window_attn_skip_freq": pattern}


def gpt_oss_arguments(model: Any, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    return {**rotary_arguments(model, parameters, kept), SOFTMAX: LEARNABLE}


MEGATRON = MegatronMap(arguments=gpt_oss_arguments, takes=has_sinks, section=gpt_oss_section, reads=READS)
