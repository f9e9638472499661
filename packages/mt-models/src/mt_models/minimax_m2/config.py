"""Configuration of MiniMax-M2, and its published size."""

from __future__ import annotations

from typing import Any

from mt_core.config_map import MegatronMap
from mt_models.blocks.config import PartialRotaryConfig


class MiniMaxM2Config(PartialRotaryConfig):
    """MiniMax-M2, M2.1, M2.5 and M2.7 (MiniMax, 2025 and 2026)."""

    moe: dict[str, Any]
    """Options of the MoE layers; num_experts has to be set."""

    @property
    def qk_layernorm_over_heads(self) -> bool:
        return True

    @property
    def add_qkv_bias(self) -> bool:
        return False

    @property
    def qk_layernorm(self) -> bool:
        return True


# -- published size ----------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "minimax-m2": {
        "model": {
            "num_layers": 62,
            "hidden_size": 3072,
            "num_attention_heads": 48,
            "num_query_groups": 8,
            "kv_channels": 128,
            "ffn_hidden_size": 1536,
            "vocab_size": 200064,
            "max_position_embeddings": 196608,
            "rotary_base": 5000000.0,
            "rotary_percent": 0.5,
            "moe": {
                "num_experts": 256,
                "moe_router_topk": 8,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
            },
        },
        "data": {"seq_length": 4096},
    },
}


MEGATRON = MegatronMap(
    unsupported="Megatron normalizes queries and keys head by head, this family over all heads together"
)
