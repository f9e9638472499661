"""Configuration of dots.llm1 and Solar Open, and their published sizes."""

from __future__ import annotations

from typing import Any

from mt_core.config_map import MegatronMap
from mt_models.blocks.config import RMSNormDecoderConfig


class Dots1Config(RMSNormDecoderConfig):
    """dots.llm1 (rednote, 2025) and Solar Open (Upstage, 2025)."""

    qk_layernorm: bool = True
    """Normalize each query and key head before positions are applied: dots.llm1."""
    moe: dict[str, Any]
    """Options of the MoE layers; num_experts has to be set."""

    @property
    def add_qkv_bias(self) -> bool:
        return False


# -- published sizes ---------------------------------------------------------------------------------

ROUTER = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
PRESETS: dict[str, dict[str, Any]] = {
    "dots.llm1-142b-a14b": {
        "model": {
            "num_layers": 62,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "ffn_hidden_size": 10944,
            "vocab_size": 152064,
            "norm_epsilon": 1e-5,
            "max_position_embeddings": 32768,
            "rotary_base": 10000000.0,
            "moe": {
                **ROUTER,
                "num_experts": 128,
                "moe_router_topk": 6,
                "moe_router_topk_scaling_factor": 2.5,
                "moe_ffn_hidden_size": 1408,
                "moe_shared_expert_intermediate_size": 2816,
                "moe_layer_freq": "([0]*1+[1]*61)",
            },
        },
        "data": {"seq_length": 4096},
    },
    "solar-open-100b": {
        "model": {
            "num_layers": 48,
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "num_query_groups": 8,
            "kv_channels": 128,
            "ffn_hidden_size": 10240,
            "vocab_size": 196608,
            "norm_epsilon": 1e-5,
            "max_position_embeddings": 131072,
            "rotary_base": 1000000.0,
            "rope_scaling_type": "yarn",
            "rope_scaling_factor": 2.0,
            "original_max_position_embeddings": 65536,
            "qk_layernorm": False,
            "moe": {
                **ROUTER,
                "num_experts": 128,
                "moe_router_topk": 8,
                "moe_ffn_hidden_size": 1280,
                "moe_shared_expert_intermediate_size": 1280,
            },
        },
        "data": {"seq_length": 4096},
    },
}


MEGATRON = MegatronMap(unsupported="no checkpoint of Megatron's has been compared with this family")
