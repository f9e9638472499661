"""Published sizes of DeepSeek-V3.2 and GLM-5."""

from __future__ import annotations

from typing import Any

from mt_models.deepseek.config import PRESETS as DEEPSEEK

_GLM_5: dict[str, Any] = {
    "num_layers": 78,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "ffn_hidden_size": 12288,
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
    "rotary_base": 1000000.0,
    "norm_epsilon": 1e-5,
    "latent_norm_epsilon": 1e-6,
    "q_lora_rank": 2048,
    "qk_head_dim": 192,
    "v_head_dim": 256,
    "dsa_indexer_n_heads": 32,
    "dsa_indexer_rope_interleaved": True,
    "mtp_num_layers": 1,
    "moe": {
        "num_experts": 256,
        "moe_router_topk": 8,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_ffn_hidden_size": 2048,
        "moe_shared_expert_intermediate_size": 2048,
        "moe_router_load_balancing_type": ["seq_aux_loss"],
        "moe_aux_loss_coeff": [0.0001],
        "moe_layer_freq": "([0]*3+[1]*75)",
    },
}
_DATA = {"seq_length": 4096}

PRESETS: dict[str, dict[str, Any]] = {
    # The sizes of DeepSeek-V3; those of the indexer are the defaults.
    "deepseek-v3.2": DEEPSEEK["deepseek-v3"],
    "glm-5": {"model": _GLM_5, "data": _DATA},
    "glm-5.2": {
        "model": {**_GLM_5, "dsa_indexer_topk_freq": 4, "dsa_indexer_skip_topk_offset": 3},
        "data": _DATA,
    },
}
