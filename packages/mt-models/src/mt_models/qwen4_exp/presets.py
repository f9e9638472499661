"""Published size of Qwen4-Exp."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "qwen4-exp": {
        "model": {
            "num_layers": 48,
            "hidden_size": 2560,
            "num_attention_heads": 24,
            "num_query_groups": 2,
            "kv_channels": 256,
            "vocab_size": 248320,
            "max_position_embeddings": 262144,
            "rotary_base": 10000000.0,
            "linear_num_value_heads": 48,
            "linear_output_gate": "sigmoid",
            "ngram_layers": [2],
            "ngram_end_of_text_id": 248044,
            "mtp_num_layers": 1,
            "moe": {
                "num_experts": 512,
                "moe_router_topk": 10,
                "moe_ffn_hidden_size": 640,
                "moe_shared_expert_intermediate_size": 640,
                "moe_shared_expert_gate": True,
                "moe_router_load_balancing_type": ["global_aux_loss"],
                "moe_aux_loss_coeff": [0.001],
            },
        },
        "data": {"seq_length": 4096},
    },
}
