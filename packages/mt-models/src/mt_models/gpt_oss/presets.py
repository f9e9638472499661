"""Shapes of the GPT-OSS models, as published."""

from __future__ import annotations

from typing import Any


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": 2880,
            "num_attention_heads": 64,
            "num_query_groups": 8,
            "kv_channels": 64,
            "ffn_hidden_size": 2880,
            "vocab_size": 201088,
            "max_position_embeddings": 131072,
            "rope_scaling_type": "yarn",
            "rope_scaling_factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_truncate": False,
            "moe": {
                "num_experts": experts,
                "moe_router_topk": 4,
                "moe_router_load_balancing_type": ["aux_loss"],
                "moe_aux_loss_coeff": [0.9],
            },
        },
        "data": {"seq_length": 4096},
    }


PRESETS: dict[str, dict[str, Any]] = {"gpt-oss-20b": _gpt_oss(24, 32), "gpt-oss-120b": _gpt_oss(36, 128)}
