"""Configuration of the decoder of Step-3.5 and Step-3.7, and its published size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, PrivateAttr

from mt_core.config.checks import must_divide
from mt_core.config.fields import PositiveFloat, PositiveInt
from mt_core.config.layer_pattern import pattern_of, read_pattern
from mt_core.config.schema import Activation, Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.config import PartialRotaryConfig, check_decoder, check_tensor_parallel
from mt_models.blocks.moe import MoEOptions

Limit = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
WINDOW_PATTERN = "model.window_attn_skip_freq"
EVERY = 4
"""By default the first of every four layers has no window."""
SCALINGS = ("none", "linear", "llama3", "yarn")


class Step3p7Config(PartialRotaryConfig):
    """Step-3.5 and Step-3.7 (StepFun, 2026), text only."""

    norm_epsilon: Annotated[float, Field(ge=0)] = 1e-5
    """Added to the mean square."""
    num_window_attention_heads: PositiveInt | None = None
    """Query heads of layers with a window. Default: num_attention_heads."""
    kv_channels: PositiveInt = 128
    """Size of a head."""
    attention_bias: bool = False
    """Biases on queries, keys, values and the output of attention."""
    sliding_window: PositiveInt = 512
    """In layers with a window a position sees itself and the sliding_window - 1 before it."""
    window_attn_skip_freq: PositiveInt | str | None = None
    """Every so many layers one sees everything before it, and the others have the window (1: none has it); or a pattern
    such as "([0]*1+[1]*3)" with a 1 for each layer with the window. Default: the first of every four layers sees
    everything."""
    rotary_base: PositiveFloat = 5000000.0
    """Base of the rotary wavelengths of layers without a window, to which rope scaling applies."""
    rotary_base_local: PositiveFloat = 10000.0
    """Base of the rotary wavelengths of layers with a window."""
    rotary_percent: Share = 0.5
    """Share of each head that is rotated in layers without a window, its first channels."""
    rotary_percent_local: Share = 1.0
    """The same in layers with a window."""
    expert_swiglu_limits: list[Limit] | None = None
    """For each layer the largest value of an expert's activated gate, and the largest magnitude of what it multiplies;
    0: none. Default: none in any layer."""
    shared_expert_swiglu_limits: list[Limit] | None = None
    """The same of the shared expert of each layer, and of the feed-forward of a dense one."""

    _layer: int | None = PrivateAttr(default=None)
    """The layer that is described: see `of_layer`."""

    @property
    def layers_with_window(self) -> list[bool]:
        """For each layer whether it has the window. Raises ConfigError for a pattern that is none."""
        freq = self.window_attn_skip_freq
        if isinstance(freq, str):
            return read_pattern(freq, self.num_layers, WINDOW_PATTERN)
        if freq is None:
            return usual_windows(self.num_layers)
        return [(layer + 1) % freq != 0 for layer in range(self.num_layers)]

    @property
    def layers_with_experts(self) -> list[bool]:
        return [False] * self.num_layers if self.moe is None else MoEOptions(self).layers

    @property
    def window_heads(self) -> int:
        """Query heads of layers with a window."""
        return self.num_window_attention_heads or self.num_attention_heads

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if self.layers_with_window[layer] else None

    def of_layer(self, layer: int) -> Self:
        """The configuration with the heads, the rotated share and the limits of activations of one layer."""
        windowed = {
            "num_attention_heads": self.window_heads,
            "num_query_groups": self.query_groups,
            "rotary_percent": self.rotary_percent_local,
        }
        described = self.model_copy(update=windowed if self.layers_with_window[layer] else {})
        described._layer = layer
        return described

    @property
    def activation(self) -> Activation:  # type: ignore[override]
        sparse = self._layer is not None and self.layers_with_experts[self._layer]
        return self._limited(self.expert_swiglu_limits if sparse else self.shared_expert_swiglu_limits)

    @property
    def shared_expert_activation(self) -> Activation:
        return self._limited(self.shared_expert_swiglu_limits)

    def _limited(self, limits: list[float] | None) -> Any:
        limit = 0.0 if limits is None or self._layer is None else limits[self._layer]
        return f"capped_swiglu:{limit}" if limit else "swiglu"

    @property
    def add_qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def add_attention_output_bias(self) -> bool:
        return self.attention_bias

    @property
    def qk_layernorm(self) -> bool:
        return True


def usual_windows(layers: int) -> list[bool]:
    """layers_with_window where window_attn_skip_freq is not set."""
    return [layer % EVERY != 0 for layer in range(layers)]


LIMITS = ("expert_swiglu_limits", "shared_expert_swiglu_limits")


def check_step3p7(config: Config) -> None:
    """Raise ConfigError for heads, frequencies, limits and layouts that do not fit together."""
    check_decoder(config)
    model = config.model
    assert isinstance(model, Step3p7Config)
    if any(model.layers_with_window):
        _check_window_layers(config, model)
    if model.rope_scaling_type not in SCALINGS:
        raise ConfigError(
            f"model.rope_scaling_type={model.rope_scaling_type} is not defined for a step3p7; it can be "
            f"{', '.join(SCALINGS)}"
        )
    for key in LIMITS:
        _check_limits(model, key)
    _check_dense_layers(model)


def _check_window_layers(config: Config, model: Step3p7Config) -> None:
    heads, groups = model.window_heads, model.query_groups
    must_divide("model.num_query_groups", groups, "model.num_window_attention_heads", heads)
    check_tensor_parallel(config, query_groups=groups, ffn_size=model.ffn_size, heads=heads)
    rotated = int(model.head_dim * model.rotary_percent_local)
    if rotated == 0 or rotated % 2:
        raise ConfigError(
            f"model.rotary_percent_local={model.rotary_percent_local} of {model.head_dim} channels rotates {rotated}; "
            "it has to be an even number, at least 2"
        )


def _check_limits(model: Step3p7Config, key: str) -> None:
    limits: list[float] | None = getattr(model, key)
    if limits is not None and len(limits) != model.num_layers:
        raise ConfigError(
            f"model.{key} has {len(limits)} values; it needs one for each of the model.num_layers={model.num_layers}"
        )


def _check_dense_layers(model: Step3p7Config) -> None:
    layers = enumerate(zip(model.expert_swiglu_limits or [], model.layers_with_experts, strict=False))
    if dense := [layer for layer, (limit, sparse) in layers if limit and not sparse]:
        raise ConfigError(f"model.expert_swiglu_limits limits layers {dense}, which have no experts; it can be 0 there")


def shrink_step3p7(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """See `ModelSpec.shrink`: a layer without a window, then one with it, and so on."""
    heads = model["num_attention_heads"]
    return {
        "sliding_window": max(seq_length // 2, 1),
        "window_attn_skip_freq": pattern_of([layer % 2 == 1 for layer in range(model["num_layers"])]),
        "num_window_attention_heads": None if model["num_window_attention_heads"] is None else 2 * heads,
        **dict.fromkeys(LIMITS),
    }


# -- published size ----------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "step-3.5-flash": {
        "model": {
            "num_layers": 45,
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "num_window_attention_heads": 96,
            "num_query_groups": 8,
            "ffn_hidden_size": 11264,
            "vocab_size": 128896,
            "max_position_embeddings": 262144,
            "rope_scaling_type": "llama3",
            "rope_scaling_factor": 2.0,
            "original_max_position_embeddings": 131072,
            "rope_low_freq_factor": 1.0,
            "rope_high_freq_factor": 32.0,
            "expert_swiglu_limits": [0.0] * 43 + [7.0] * 2,
            "shared_expert_swiglu_limits": [0.0] * 43 + [16.0] * 2,
            "moe": {
                "num_experts": 288,
                "moe_router_topk": 8,
                "moe_ffn_hidden_size": 1280,
                "moe_shared_expert_intermediate_size": 1280,
                "moe_layer_freq": "([0]*3+[1]*42)",
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_topk_scaling_factor": 3.0,
                "moe_router_load_balancing_type": ["none"],
            },
        },
        "data": {"seq_length": 4096},
    },
}

MEGATRON = MegatronMap(unsupported="Megatron has no gates of heads, and no query heads by layer")
