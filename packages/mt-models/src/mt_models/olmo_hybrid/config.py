"""Configuration of OLMo-Hybrid, its published size and its FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.config import RMSNormDecoderConfig, check_decoder
from mt_models.blocks.delta_net_config import (
    DeltaNetKeys,
    check_delta_nets,
    linear_layers,
)
from mt_models.delta_net_flops import DeltaNetFlops, delta_net_flops
from mt_models.flops import Convention, dense_feed_forward_flops, projection_flops

Positive = Annotated[float, Field(gt=0)]


class OlmoHybridConfig(DeltaNetKeys, RMSNormDecoderConfig):
    """OLMo-Hybrid (2026)."""

    attention_bias: bool = False
    """Biases on queries, keys, values and the output of attention."""
    position_embedding_type: Literal["rope", "none"] = "rope"
    """How attention gets positions: by rotating queries and keys, or not at all, since the delta nets have the
    order."""
    linear_allow_neg_eigval: bool = True
    """The strength of an update is up to 2 instead of 1, so that it may turn what the state has into its negative."""
    linear_a_log_min: Annotated[float, Field(ge=0)] = 0.0
    """Smallest initial rate of decay."""
    linear_a_log_max: Positive = 16.0
    """Largest initial rate of decay."""
    linear_dt_min: Positive = 1e-3
    """Smallest initial time step."""
    linear_dt_max: Positive = 0.1
    """Largest initial time step."""
    linear_dt_init_floor: Positive = 1e-4
    """Initial time steps below are raised to this."""

    @property
    def linear_layers(self) -> list[bool]:
        """For each layer whether it is a gated delta net."""
        return linear_layers(self)

    @property
    def linear_norm_epsilon(self) -> float:
        # Fixed by the class, whatever the other norms have.
        return 1e-5

    def rotates(self, layer: int) -> bool:
        return self.position_embedding_type == "rope"

    @property
    def norms_of_branches(self) -> bool:
        """Whether norms are those of branches, in layers with attention; those of delta nets have their norms in
        front."""
        return True

    @property
    def qk_layernorm_over_heads(self) -> bool:
        return True

    @property
    def qk_layernorm(self) -> bool:
        return True

    @property
    def add_qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def add_attention_output_bias(self) -> bool:
        return self.attention_bias


def check_olmo_hybrid(config: Config) -> None:
    """Raise ConfigError for heads, layers and layouts that do not fit together."""
    check_decoder(config)
    check_delta_nets(config)
    model = config.model
    assert isinstance(model, OlmoHybridConfig)
    for low, high in (("linear_a_log_min", "linear_a_log_max"), ("linear_dt_min", "linear_dt_max")):
        if getattr(model, low) > getattr(model, high):
            raise ConfigError(f"model.{low}={getattr(model, low)} is above model.{high}={getattr(model, high)}")
    if model.position_embedding_type == "none" and model.rope_scaling_type != "none":
        raise ConfigError(
            f"model.rope_scaling_type={model.rope_scaling_type} would be ignored: model.position_embedding_type=none "
            "has no rotary positions"
        )


SMALL = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_attention_freq": 2,
    "linear_chunk_size": 8,
}


def shrink_olmo_hybrid(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """See `ModelSpec.shrink`."""
    return dict(SMALL)


PRESETS: dict[str, dict[str, Any]] = {
    "olmo-hybrid-7b": {
        "model": {
            "num_layers": 32,
            "hidden_size": 3840,
            "num_attention_heads": 30,
            "num_query_groups": 30,
            "ffn_hidden_size": 11008,
            "vocab_size": 100352,
            "max_position_embeddings": 65536,
            "position_embedding_type": "none",
            "linear_num_key_heads": 30,
            "linear_num_value_heads": 30,
            "linear_key_head_dim": 96,
            "linear_value_head_dim": 192,
        },
        "data": {"seq_length": 4096},
    },
}

MEGATRON = MegatronMap(
    unsupported="Megatron has no layers without a norm before attention and feed-forward, and normalizes queries and "
    "keys head by head"
)


def flops_per_token(config: OlmoHybridConfig, seq_length: int, *, convention: Convention = "seen") -> DeltaNetFlops:
    """The mean over the tokens of a sequence. Raises ConfigError when the vocabulary is unknown."""
    return delta_net_flops(
        config,
        seq_length,
        convention,
        projections=projection_flops(config),
        feed_forward=dense_feed_forward_flops(config),
    )


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model: Any = config.model
    return config.data.seq_length * flops_per_token(model, config.data.seq_length).training
