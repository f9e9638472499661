"""Configuration of Inkling's decoder, and its published size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field

from mt_core.config.checks import must_divide
from mt_core.config.fields import PositiveFloat, PositiveInt
from mt_core.config.layer_pattern import pattern_of, read_pattern
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.config import (
    RMSNormDecoderConfig,
    check_moe_decoder,
    check_tensor_parallel,
    refuse_divided_sequences,
)
from mt_models.blocks.moe import MoEOptions

WINDOW_PATTERN = "model.window_attn_skip_freq"
ROTARY = ("rotary_base", "rope_scaling_type")


class InklingConfig(RMSNormDecoderConfig):
    """Inkling (Thinking Machines, 2026), text only. num_attention_heads, num_query_groups and kv_channels are of layers
    without a window."""

    sliding_window: PositiveInt = 512
    """In layers with a window a position sees itself and the sliding_window - 1 before it."""
    window_attn_skip_freq: PositiveInt | str = 6
    """Every so many layers one sees everything before it, and the others have the window (1: none has it); or a pattern
    such as "([1]*5+[0]*1)" with a 1 for each layer with the window."""
    window_attention_heads: PositiveInt | None = None
    """Query heads of layers with a window. Default: num_attention_heads."""
    window_query_groups: PositiveInt | None = None
    """Key-value heads of layers with a window. Default: num_query_groups."""
    window_kv_channels: PositiveInt | None = None
    """Size of a head of layers with a window. Default: that of the others."""
    relative_rank: PositiveInt = 16
    """Numbers of each query head that weigh the rows of a layer's table of biases by distance."""
    relative_extent: PositiveInt = 1024
    """Distances with a bias, in layers without a window; those with one have it for all that they see."""
    conv_kernel: Annotated[int, Field(ge=2)] = 4
    """Positions that the convolutions see: a position and those before it."""
    log_scaling_floor: PositiveInt | None = None
    """From this position p on, scores of layers without a window are multiplied by 1 + log_scaling_alpha
    ln((p + 1) / log_scaling_floor). Default: nowhere."""
    log_scaling_alpha: float = 0.1
    """See log_scaling_floor."""
    logits_divisor: PositiveFloat = 1.0
    """Divides the output of the last norm before the LM head."""
    unpadded_vocab_size: PositiveInt | None = None
    """Tokens from this id on are never predicted: their logits are -inf. Default: there are none."""
    moe: dict[str, Any]
    """Options of the MoE layers; num_experts and moe_shared_expert_intermediate_size have to be set. The latter is the
    width of all shared experts together, each of which is as wide as a routed one."""

    @property
    def layers_with_window(self) -> list[bool]:
        """For each layer whether it has the window. Raises ConfigError for a pattern that is none."""
        freq = self.window_attn_skip_freq
        if isinstance(freq, str):
            return read_pattern(freq, self.num_layers, WINDOW_PATTERN)
        return [(layer + 1) % freq != 0 for layer in range(self.num_layers)]

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if self.layers_with_window[layer] else None

    def of_layer(self, layer: int) -> Self:
        """The configuration with the heads of a layer."""
        return self.in_windows if self.layers_with_window[layer] else self

    @property
    def in_windows(self) -> Self:
        """The configuration with the heads of layers with a window."""
        heads = {
            "num_attention_heads": self.window_attention_heads or self.num_attention_heads,
            "num_query_groups": self.window_query_groups or self.query_groups,
            "kv_channels": self.window_kv_channels or self.head_dim,
        }
        return self.model_copy(update=heads)

    def extent_of(self, layer: int) -> int:
        """Distances with a bias."""
        return self.window_of(layer) or self.relative_extent

    def rotates(self, layer: int) -> bool:
        return False

    @property
    def add_qkv_bias(self) -> bool:
        return False

    @property
    def qk_layernorm(self) -> bool:
        return True

    @property
    def scored_shared_experts(self) -> int:
        """What the MoE layer reads: shared experts that the router scores."""
        moe = MoEOptions(self)
        return (moe.shared_size or 0) // moe.ffn_size


def check_inkling(config: Config) -> None:
    """Raise ConfigError for heads, experts and layouts that do not fit."""
    check_moe_decoder(config)
    refuse_divided_sequences(config)
    model = config.model
    assert isinstance(model, InklingConfig)
    for key in ROTARY:
        if getattr(model, key) != type(model).model_fields[key].default:
            raise ConfigError(f"model.{key}={getattr(model, key)} would be ignored: this family rotates nothing")
    _check_heads(config, model)
    _check_experts(model)


def _check_heads(config: Config, model: InklingConfig) -> None:
    size = config.parallel.tensor_model_parallel_size
    for layer_config, keys in ((model, "num_query_groups"), (model.in_windows, "window_query_groups")):
        must_divide(f"model.{keys}", layer_config.query_groups, "the query heads", layer_config.num_attention_heads)
        check_tensor_parallel(
            config,
            query_groups=layer_config.query_groups,
            ffn_size=model.ffn_size,
            heads=layer_config.num_attention_heads,
        )
        # Each key-value head has channels of a convolution, which one rank holds.
        must_divide("parallel.tensor_model_parallel_size", size, f"model.{keys}", layer_config.query_groups)


def _check_experts(model: InklingConfig) -> None:
    moe = MoEOptions(model)
    if not moe.shared_size or moe.shared_size % moe.ffn_size:
        raise ConfigError(
            f"model.moe.moe_shared_expert_intermediate_size={moe.shared_size} has to be a multiple of the width "
            f"{moe.ffn_size} of a routed expert: the router scores each shared expert of that width"
        )
    for key, allowed in (
        ("moe_router_score_function", "sigmoid"), ("moe_num_zero_experts", 0), ("moe_shared_expert_gate", False),
        ("moe_router_expert_scale", False), ("moe_latent_size", None),
    ):  # fmt: skip
        if moe[key] != allowed:
            raise ConfigError(
                f"model.moe.{key}={moe[key]} is not possible with model.family=inkling, whose router scores shared "
                f"experts too; it can be {allowed}"
            )


def shrink_inkling(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """See `ModelSpec.shrink`: a layer with the window, then one without, and so on."""
    return {
        "sliding_window": max(seq_length // 2, 1),
        "window_attn_skip_freq": pattern_of([layer % 2 == 0 for layer in range(model["num_layers"])]),
        "window_attention_heads": None,
        "window_query_groups": None,
        "window_kv_channels": None,
        "relative_extent": max(seq_length - 1, 1),
    }


# -- published size ----------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "inkling": {
        "model": {
            "num_layers": 66,
            "hidden_size": 6144,
            "num_attention_heads": 64,
            "num_query_groups": 8,
            "kv_channels": 128,
            "window_query_groups": 16,
            "ffn_hidden_size": 24576,
            "vocab_size": 201024,
            "max_position_embeddings": 131072,
            "logits_divisor": 24.0,
            "moe": {
                "num_experts": 256,
                "moe_router_topk": 6,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_topk_scaling_factor": 8.0,
                "moe_ffn_hidden_size": 3072,
                "moe_shared_expert_intermediate_size": 6144,
            },
        },
        "data": {"seq_length": 4096},
    },
}

MEGATRON = MegatronMap(
    unsupported="Megatron has no short convolutions behind blocks, no relative positions from projections of queries' "
    "inputs, and no routers that score shared experts"
)
