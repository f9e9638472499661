"""Configuration of Kimi Linear, and its published size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from mt_core.config.fields import PositiveInt
from mt_core.config.layer_pattern import pattern_of
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.delta_net_config import DeltaNetKeys, check_delta_nets, linear_layers
from mt_models.deepseek.config import DeepseekConfig, check_deepseek, shrink_deepseek


class KimiLinearConfig(DeltaNetKeys, DeepseekConfig):
    """Kimi Linear 48B-A3B (Moonshot AI, 2025)."""

    predicts: ClassVar[bool] = False
    """Whether the family has layers of multi-token prediction, which are of latent attention."""
    linear_num_key_heads: PositiveInt = 32
    """Heads of Kimi delta attention."""
    linear_num_value_heads: PositiveInt = 32
    """The same number: a head has queries, keys and values."""

    @property
    def linear_layers(self) -> list[bool]:
        """For each layer whether it is Kimi delta attention; the others are latent attention."""
        return linear_layers(self)

    @property
    def linear_norm_epsilon(self) -> float:
        return self.norm_epsilon

    @property
    def linear_allow_neg_eigval(self) -> bool:
        return False

    def rotates(self, layer: int) -> bool:
        return False

    def with_predicted_layers(self) -> Self:
        attention = [False] * self.mtp_num_layers
        kinds = self.model_copy(update={"linear_attention_freq": pattern_of(self.linear_layers + attention)})
        return super(KimiLinearConfig, kinds).with_predicted_layers()


ROTARY = ("rotary_base", "rope_scaling_type")


def check_kimi_linear(config: Config) -> None:
    check_kimi_layers(config)
    model = config.model
    for key in ROTARY:
        if getattr(model, key) != type(model).model_fields[key].default:
            raise ConfigError(f"model.{key}={getattr(model, key)} would be ignored: this family has no positions")


def check_kimi_layers(config: Config) -> None:
    """Raise ConfigError for heads of different sizes, and for layers of multi-token prediction in a family without."""
    check_deepseek(config)
    check_delta_nets(config)
    model = config.model
    assert isinstance(model, KimiLinearConfig)
    for key, other in (
        ("linear_num_key_heads", "linear_num_value_heads"),
        ("linear_key_head_dim", "linear_value_head_dim"),
    ):
        if getattr(model, key) != getattr(model, other):
            raise ConfigError(
                f"model.{key}={getattr(model, key)} and model.{other}={getattr(model, other)} have to be equal: a head "
                "of Kimi delta attention has queries, keys and values of one size"
            )
    if model.mtp_num_layers and not model.predicts:
        raise ConfigError(
            f"model.mtp_num_layers={model.mtp_num_layers} is not supported by model.family={model.family}; it can be 0"
        )


def shrink_kimi_linear(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """Both kinds of layers stay."""
    sizes = {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    kinds = {"linear_value_head_dim": 8, "linear_chunk_size": 8, "linear_attention_freq": 2}
    return {**shrink_deepseek(model, seq_length), **sizes, **kinds}


MEGATRON = MegatronMap(unsupported="Megatron has no Kimi delta attention")


# -- published size ------------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "kimi-linear-48b-a3b": {
        "model": {
            "num_layers": 27,
            "hidden_size": 2304,
            "num_attention_heads": 32,
            "ffn_hidden_size": 9216,
            "vocab_size": 163840,
            "max_position_embeddings": 1048576,
            "norm_epsilon": 1e-5,
            "latent_norm_epsilon": 1e-6,
            "linear_attention_freq": "([1]*3+[0]*1)*6+[1]*2+[0]*1",
            "moe": {
                "num_experts": 256,
                "moe_router_topk": 8,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_topk_scaling_factor": 2.446,
                "moe_ffn_hidden_size": 1024,
                "moe_shared_expert_intermediate_size": 1024,
                "moe_router_load_balancing_type": ["seq_aux_loss"],
                "moe_aux_loss_coeff": [0.0001],
                "moe_layer_freq": "([0]*1+[1]*26)",
            },
        },
        "data": {"seq_length": 4096},
    },
}
