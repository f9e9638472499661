"""Configuration of GLM-4.7-Flash, and its published size."""

from __future__ import annotations

from typing import Any

from mt_core.config_map import MegatronMap
from mt_models.deepseek.config import DeepseekConfig
from mt_models.deepseek.megatron import deepseek_arguments


class Glm4MoeLiteConfig(DeepseekConfig):
    """GLM-4.7-Flash (Z.ai, 2026)."""


# -- published size ----------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "glm-4.7-flash": {
        "model": {
            "num_layers": 47,
            "hidden_size": 2048,
            "num_attention_heads": 20,
            "ffn_hidden_size": 10240,
            "vocab_size": 154880,
            "max_position_embeddings": 202752,
            "rotary_base": 1000000.0,
            "norm_epsilon": 1e-5,
            "latent_norm_epsilon": 1e-6,
            "q_lora_rank": 768,
            "qk_head_dim": 192,
            "v_head_dim": 256,
            "mtp_num_layers": 1,
            "moe": {
                "num_experts": 64,
                "moe_router_topk": 4,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_topk_scaling_factor": 1.8,
                "moe_ffn_hidden_size": 1536,
                "moe_shared_expert_intermediate_size": 1536,
                "moe_router_load_balancing_type": ["seq_aux_loss"],
                "moe_aux_loss_coeff": [0.0001],
                "moe_layer_freq": "([0]*1+[1]*46)",
            },
        },
        "data": {"seq_length": 4096},
    },
}

MEGATRON = MegatronMap(arguments=deepseek_arguments)
"""Megatron's arguments do not tell it from a DeepSeek-V3, as which its checkpoints are read."""
