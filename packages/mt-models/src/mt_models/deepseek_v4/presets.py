"""Published sizes of DeepSeek-V4. The base models have the sizes of the others."""

from __future__ import annotations

from typing import Any


def _deepseek_v4(
    layers: int, hidden: int, heads: int, ratios: list[int], moe: dict[str, Any], **keys: Any
) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "vocab_size": 129280,
            "max_position_embeddings": 1048576,
            "compress_ratios": ratios,
            "rope_scaling_type": "yarn",
            "rope_scaling_factor": 16.0,
            "original_max_position_embeddings": 65536,
            "rope_attention_factor": 1.0,
            "mtp_num_layers": 1,
            "moe": {
                "moe_router_topk": 6,
                "moe_router_score_function": "sqrtsoftplus",
                "moe_router_enable_expert_bias": True,
                "moe_router_hash_layers": 3,
                "moe_router_load_balancing_type": ["seq_aux_loss"],
                "moe_aux_loss_coeff": [0.0001],
                **moe,
            },
            **keys,
        },
        "data": {"seq_length": 4096},
    }


def _experts(count: int, width: int, scale: float) -> dict[str, Any]:
    return {
        "num_experts": count,
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width,
        "moe_router_topk_scaling_factor": scale,
    }


_FLASH = _deepseek_v4(43, 4096, 64, [0, 0, *[4, 128] * 20, 4], _experts(256, 2048, 1.5))
_PRO = _deepseek_v4(
    61,
    7168,
    128,
    [128, 128, *[4, 128] * 29, 4],
    _experts(384, 3072, 2.5),
    q_lora_rank=1536,
    o_groups=16,
    dsa_indexer_topk=1024,
)

PRESETS: dict[str, dict[str, Any]] = {
    "deepseek-v4-flash": _FLASH,
    "deepseek-v4-flash-base": _FLASH,
    "deepseek-v4-pro": _PRO,
    "deepseek-v4-pro-base": _PRO,
}
