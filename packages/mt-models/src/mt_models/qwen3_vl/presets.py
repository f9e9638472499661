"""Published sizes of Qwen3-VL."""

from __future__ import annotations

from typing import Any

BASE = {
    "num_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "ffn_hidden_size": 4096,
    "deepstack_layers": [5, 11, 17],
}
LARGE = {"num_layers": 27, "hidden_size": 1152, "num_attention_heads": 16, "ffn_hidden_size": 4304}


def _qwen3_vl(
    layers: int, hidden: int, heads: int, groups: int, ffn: int, vision: dict[str, Any], **keys: Any
) -> dict[str, Any]:
    decoder = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "ffn_hidden_size": ffn,
        **keys,
    }
    return {
        "model": {
            "vision_model": vision,
            "language_model": decoder,
            "vocab_size": 151936,
            "image_token_index": 151655,
        },
        "data": {"seq_length": 4096},
    }


def _sparse(layers: int, hidden: int, heads: int, ffn: int, expert_ffn: int) -> dict[str, Any]:
    moe = {
        "num_experts": 128,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": expert_ffn,
        "moe_router_load_balancing_type": ["aux_loss"],
        "moe_aux_loss_coeff": [0.001],
    }
    return _qwen3_vl(layers, hidden, heads, 4, ffn, LARGE, moe=moe)


PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-vl-2b": _qwen3_vl(28, 2048, 16, 8, 6144, BASE, untie_embeddings_and_output_weights=False),
    "qwen3-vl-4b": _qwen3_vl(36, 2560, 32, 8, 9728, BASE, untie_embeddings_and_output_weights=False),
    "qwen3-vl-8b": _qwen3_vl(36, 4096, 32, 8, 12288, LARGE),
    "qwen3-vl-32b": _qwen3_vl(64, 5120, 64, 8, 25600, LARGE),
    "qwen3-vl-30b-a3b": _sparse(48, 2048, 32, 6144, 768),
    "qwen3-vl-235b-a22b": _sparse(94, 4096, 64, 12288, 1536),
}
