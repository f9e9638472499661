"""Shapes of the DeepSeek models, as published (base models)."""

from __future__ import annotations

from typing import Any

_YARN = {
    "rope_scaling_type": "yarn",
    "rope_scaling_factor": 40.0,
    "original_max_position_embeddings": 4096,
    "max_position_embeddings": 163840,
}


def _deepseek(
    layers: int, hidden: int, heads: int, ffn: int, vocab: int, dense: int, moe: dict[str, Any], **keys: Any
) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "ffn_hidden_size": ffn,
            "vocab_size": vocab,
            "moe": {**moe, "moe_layer_freq": f"([0]*{dense}+[1]*{layers - dense})"},
            **_YARN,
            **keys,
        },
        "data": {"seq_length": 4096},
    }


def _v2_experts(num: int, ffn: int, scale: float, **keys: Any) -> dict[str, Any]:
    """6 of `num` experts per token, and 2 shared ones."""
    return {
        "num_experts": num,
        "moe_router_topk": 6,
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": scale,
        "moe_ffn_hidden_size": ffn,
        "moe_shared_expert_intermediate_size": 2 * ffn,
        "moe_router_load_balancing_type": ["seq_aux_loss"],
        "moe_aux_loss_coeff": [0.001],
        **keys,
    }


_V2_GROUPS = {"moe_router_num_groups": 8, "moe_router_group_topk": 3, "moe_router_group_score_topk": 1}
_V3_EXPERTS = {
    "num_experts": 256,
    "moe_router_topk": 8,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 4,
    "moe_router_group_score_topk": 2,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_router_load_balancing_type": ["seq_aux_loss"],
    "moe_aux_loss_coeff": [0.0001],
}

PRESETS: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": _deepseek(
        27, 2048, 16, 10944, 102400, 1, _v2_experts(64, 1408, 1.0), rope_mscale=0.707, rope_mscale_all_dim=0.707
    ),
    "deepseek-v2": _deepseek(
        60,
        5120,
        128,
        12288,
        102400,
        1,
        _v2_experts(160, 1536, 16.0, **_V2_GROUPS),
        q_lora_rank=1536,
        rope_mscale=0.707,
        rope_mscale_all_dim=0.707,
    ),
    "deepseek-v3": _deepseek(
        61,
        7168,
        128,
        18432,
        129280,
        3,
        _V3_EXPERTS,
        q_lora_rank=1536,
        mtp_num_layers=1,
        rope_mscale=1.0,
        rope_mscale_all_dim=1.0,
    ),
}
