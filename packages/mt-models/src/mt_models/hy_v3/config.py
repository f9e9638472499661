"""Configuration of Hy3, and its published size."""

from __future__ import annotations

from typing import Any

from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_models.blocks.config import RMSNormDecoderConfig, check_moe_decoder
from mt_models.blocks.prediction_config import PredictionKeys, check_prediction


class HyV3Config(PredictionKeys, RMSNormDecoderConfig):
    """Hy3 (Tencent, 2026)."""

    attention_bias: bool = False
    """Biases on queries, keys, values and the output of attention."""
    moe: dict[str, Any]
    """Options of the MoE layers; num_experts has to be set."""

    @property
    def add_qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def add_attention_output_bias(self) -> bool:
        return self.attention_bias

    @property
    def qk_layernorm(self) -> bool:
        return True


def check_hy_v3(config: Config) -> None:
    check_moe_decoder(config)
    assert isinstance(config.model, HyV3Config)
    check_prediction(config, config.model)


# -- published size ----------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "hy3": {
        "model": {
            "num_layers": 80,
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "num_query_groups": 8,
            "kv_channels": 128,
            "ffn_hidden_size": 13312,
            "vocab_size": 120832,
            "max_position_embeddings": 262144,
            "rotary_base": 11158840.0,
            "norm_epsilon": 1e-5,
            "init_method_std": 0.006,
            "mtp_num_layers": 1,
            "moe": {
                "num_experts": 192,
                "moe_router_topk": 8,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_topk_scaling_factor": 2.826,
                "moe_ffn_hidden_size": 1536,
                "moe_shared_expert_intermediate_size": 1536,
                "moe_layer_freq": "([0]*1+[1]*79)",
            },
        },
        "data": {"seq_length": 4096},
    },
}

MEGATRON = MegatronMap(unsupported="no checkpoint of Megatron's with such a model has been compared with this family")
