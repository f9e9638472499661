"""Configuration of Jamba, its published sizes and its FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from mt_core.config.checks import must_divide
from mt_core.config.fields import NonNegativeInt, PositiveInt
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.config import RMSNormDecoderConfig, check_decoder
from mt_models.flops import (
    core_flops,
    dense_feed_forward_flops,
    experts_flops,
    mean_keys,
    output_flops,
    projection_flops,
)


class JambaConfig(RMSNormDecoderConfig):
    """Jamba (AI21 Labs, 2024)."""

    attn_layer_period: PositiveInt = 8
    """One layer in so many has attention, the others a Mamba-1 mixer."""
    attn_layer_offset: NonNegativeInt = 4
    """The first layer with attention, counted from 0."""
    mamba_state_dim: PositiveInt = 16
    """Numbers that the state keeps for each channel."""
    mamba_conv_kernel: PositiveInt = 4
    """Positions that the convolution sees: a position and those before it."""
    mamba_expand: PositiveInt = 2
    """Channels of a mixer for each of the residual stream."""
    mamba_dt_rank: PositiveInt | None = None
    """Rank of the projection to time steps. Default: hidden_size / 16, rounded up."""
    mamba_conv_bias: bool = True
    """A bias for each channel of the convolution."""
    mamba_proj_bias: bool = False
    """Biases in the input and output projections of a mixer."""
    use_mamba_kernels: bool = True
    """What config.json says of other programs' kernels, kept for them; here mamba_scan_backend chooses."""
    mamba_scan_backend: Literal["auto", "torch", "triton"] = "auto"
    """What computes the recurrence: torch, mt's Triton kernels (on a GPU in bf16, at most 64 numbers of the state for
    each channel), or auto, which is torch."""

    @property
    def attention_layers(self) -> list[bool]:
        """For each layer whether it has attention."""
        return [layer % self.attn_layer_period == self.attn_layer_offset for layer in range(self.num_layers)]

    @property
    def mamba_inner_size(self) -> int:
        return self.mamba_expand * self.hidden_size

    @property
    def time_step_rank(self) -> int:
        return self.mamba_dt_rank or -(-self.hidden_size // 16)

    @property
    def add_qkv_bias(self) -> bool:
        return False

    @property
    def qk_layernorm(self) -> bool:
        return False

    def rotates(self, layer: int) -> bool:
        return False


ROTARY = ("rotary_base", "rope_scaling_type")


def check_jamba(config: Config) -> None:
    check_decoder(config)
    model = config.model
    assert isinstance(model, JambaConfig)
    if model.attn_layer_offset >= model.attn_layer_period:
        raise ConfigError(
            f"model.attn_layer_offset={model.attn_layer_offset} has to be below model.attn_layer_period="
            f"{model.attn_layer_period}"
        )
    for key in ROTARY:
        if getattr(model, key) != type(model).model_fields[key].default:
            raise ConfigError(f"model.{key}={getattr(model, key)} would be ignored: this family has no positions")
    if config.parallel.context_parallel_size > 1:
        raise ConfigError(
            f"parallel.context_parallel_size={config.parallel.context_parallel_size} is not supported by "
            "model.family=jamba, whose recurrence needs all channels of all positions; it can be 1"
        )
    size = config.parallel.tensor_model_parallel_size
    must_divide("parallel.tensor_model_parallel_size", size, "the channels of a mixer", model.mamba_inner_size)


def shrink_jamba(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """See `ModelSpec.shrink`: both kinds of layers in turn."""
    return {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": None}


MEGATRON = MegatronMap(unsupported="Megatron has no Mamba-1 layers")


# -- published sizes ---------------------------------------------------------------------------------


def _jamba(layers: int, hidden: int, heads: int, ffn: int) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": 8,
            "ffn_hidden_size": ffn,
            "vocab_size": 65536,
            "max_position_embeddings": 262144,
            "moe": {
                "num_experts": 16,
                "moe_router_topk": 2,
                "moe_router_pre_softmax": True,
                "moe_layer_freq": "[0,1]*" + str(layers // 2),
                "moe_router_load_balancing_type": ["aux_loss"],
                "moe_aux_loss_coeff": [0.001],
            },
        },
        "data": {"seq_length": 4096},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "jamba-mini": _jamba(32, 4096, 32, 14336),
    "jamba-large": _jamba(72, 8192, 64, 24576),
}


# -- FLOPs -------------------------------------------------------------------------------------------


def mixer_flops(config: JambaConfig) -> float:
    """FLOPs for each token of one Mamba-1 mixer: projections, taps, and the recurrence (decay, input and output)."""
    hidden, inner, state = config.hidden_size, config.mamba_inner_size, config.mamba_state_dim
    rank = config.time_step_rank
    products = 3 * hidden * inner + inner * (rank + 2 * state) + rank * inner
    return 2.0 * (products + config.mamba_conv_kernel * inner + 3 * inner * state)


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model, length = config.model, config.data.seq_length
    assert isinstance(model, JambaConfig)
    attentions = sum(model.attention_layers)
    experts = experts_flops(model)
    of_token = (
        attentions * (projection_flops(model) + core_flops(model, mean_keys(length, None, "seen")))
        + (model.num_layers - attentions) * mixer_flops(model)
        + model.num_layers * (dense_feed_forward_flops(model) if experts is None else experts)
        + output_flops(model.hidden_size, model.vocab_size)
    )
    return 3 * length * of_token
