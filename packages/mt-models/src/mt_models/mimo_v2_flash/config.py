"""Configuration of MiMo-V2-Flash, and its published size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field

from mt_core.config.checks import must_divide
from mt_core.config.fields import NonNegativeInt, PositiveFloat, PositiveInt
from mt_core.config.layer_pattern import pattern_of, read_pattern
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.config import PartialRotaryConfig, check_decoder, check_tensor_parallel
from mt_models.blocks.moe import MoEOptions
from mt_models.blocks.prediction_config import check_prediction

WINDOW_PATTERN = "model.window_attn_skip_freq"
EVERY = 6
"""By default the first layer and every sixth have no window."""


class MiMoV2FlashConfig(PartialRotaryConfig):
    """MiMo-V2-Flash (Xiaomi, 2025)."""

    norm_epsilon: Annotated[float, Field(ge=0)] = 1e-5
    """Added to the mean square."""
    num_query_groups: PositiveInt | None = None
    """Key-value heads of layers without a window; those with one have twice as many. Default: num_attention_heads,
    which only models without windows can have."""
    kv_channels: PositiveInt = 192
    """Channels of a query and key head."""
    v_head_dim: PositiveInt = 128
    """Channels of a value head."""
    attention_value_scale: PositiveFloat = 0.707
    """Values are multiplied by this."""
    attention_bias: bool = False
    """Biases on queries, keys and values."""
    attention_backend: str = "auto"
    """Name of the attention backend. Sinks need the log-sum-exp of the scores: eager, or flex on a GPU; auto takes the
    first that serves."""
    sliding_window: PositiveInt = 129
    """In layers with a window a position sees itself and the sliding_window - 1 before it, and each head has a sink: a
    learned logit beside those of the keys, without a value."""
    window_attn_skip_freq: PositiveInt | str | None = None
    """Every so many layers one sees everything before it, and the others have the window (1: none has it); or a pattern
    such as "([0]*1+[1]*5)" with a 1 for each layer with the window. Default: as 6, and the first layer sees everything
    too."""
    rotary_base: PositiveFloat = 5000000.0
    """Base of the rotary wavelengths of layers without a window."""
    rotary_base_local: PositiveFloat = 10000.0
    """Base of the rotary wavelengths of layers with a window."""
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = 0.334
    """Share of each query and key head that is rotated, its first channels, rounded down."""
    mtp_num_layers: NonNegativeInt = 0
    """Further layers, of which the d-th predicts the token d + 1 positions ahead, in training: with a window and a
    dense feed-forward."""
    mtp_loss_scaling_factor: Annotated[float, Field(ge=0)] = 0.1
    """What the mean of their losses counts beside that of the next token."""

    @property
    def layers_with_window(self) -> list[bool]:
        """For each layer whether it has the window. Raises ConfigError for a pattern that is none."""
        freq = self.window_attn_skip_freq
        if isinstance(freq, str):
            return read_pattern(freq, self.num_layers, WINDOW_PATTERN)
        windows = [(layer + 1) % (freq or EVERY) != 0 for layer in range(self.num_layers)]
        return windows if freq else [False, *windows[1:]]

    def has_window(self, layer: int) -> bool:
        """Whether a layer has the window; those of multi-token prediction, counted behind the others, have it."""
        return layer >= self.num_layers or self.layers_with_window[layer]

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if self.has_window(layer) else None

    def of_layer(self, layer: int) -> Self:
        """The configuration with the key-value heads that a layer has."""
        return self.model_copy(update={"num_query_groups": 2 * self.query_groups}) if self.has_window(layer) else self

    @property
    def has_sinks(self) -> bool:
        """Whether a layer has sinks."""
        return bool(self.mtp_num_layers) or any(self.layers_with_window)

    @property
    def rotary_base_in_windows(self) -> float:
        return self.rotary_base_local

    @property
    def add_qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def qk_layernorm(self) -> bool:
        return False


def check_mimo_v2_flash(config: Config) -> None:
    """Raise ConfigError for heads, frequencies and layouts that do not fit together."""
    check_decoder(config)
    model = config.model
    assert isinstance(model, MiMoV2FlashConfig)
    if model.has_sinks:
        _check_window_heads(config, model)
    if model.rope_scaling_type != "none":
        raise ConfigError(
            f"model.rope_scaling_type={model.rope_scaling_type} is not defined for a mimo_v2_flash; it can be none"
        )
    if model.moe is not None:
        MoEOptions(model)
    check_prediction(config, model)


def _check_window_heads(config: Config, model: MiMoV2FlashConfig) -> None:
    groups, heads = 2 * model.query_groups, model.num_attention_heads
    must_divide("model.num_query_groups x 2 (of layers with a window)", groups, "model.num_attention_heads", heads)
    check_tensor_parallel(config, query_groups=groups, ffn_size=model.ffn_size, heads=heads)


def shrink_mimo_v2_flash(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """See `ModelSpec.shrink`: a layer without a window, then one with it, and so on."""
    return {
        "sliding_window": max(seq_length // 2, 1),
        "window_attn_skip_freq": pattern_of([layer % 2 == 1 for layer in range(model["num_layers"])]),
        "v_head_dim": 6,
        "rotary_percent": 0.5,
    }


# -- published size ----------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "mimo-v2-flash": {
        "model": {
            "num_layers": 48,
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "num_query_groups": 4,
            "ffn_hidden_size": 16384,
            "vocab_size": 152576,
            "max_position_embeddings": 262144,
            "moe": {
                "num_experts": 256,
                "moe_router_topk": 8,
                "moe_ffn_hidden_size": 2048,
                "moe_layer_freq": "([0]*1+[1]*47)",
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_load_balancing_type": ["none"],
            },
        },
        "data": {"seq_length": 4096},
    },
}

MEGATRON = MegatronMap(unsupported="Megatron has no key-value heads by layer, and no value heads of another size")
