"""Shapes of the OLMoE models, as published."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "olmoe-1b-7b": {
        "model": {
            "num_layers": 16,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_query_groups": 16,
            "ffn_hidden_size": 1024,
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
            "vocab_size": 50304,
            "moe": {
                "num_experts": 64,
                "moe_router_topk": 8,
                "moe_router_pre_softmax": True,
                "moe_router_load_balancing_type": ["aux_loss"],
                "moe_aux_loss_coeff": [0.01],
                "moe_z_loss_coeff": 0.001,
            },
        },
        "data": {"seq_length": 4096},
    },
}
