"""Published sizes of Gemma 4, text."""

from __future__ import annotations

from typing import Any

VOCAB = 262144


def _gemma4(layers: int, hidden: int, heads: int, groups: int, ffn: int, window: int, **keys: Any) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "ffn_hidden_size": ffn,
            "sliding_window": window,
            "vocab_size": VOCAB,
            "final_logit_softcapping": 30.0,
            **keys,
        },
        "data": {"seq_length": 8192},
    }


def _small(layers: int, hidden: int, groups: int, ffn: int, **keys: Any) -> dict[str, Any]:
    """With embeddings of each layer, and last layers that share keys and values."""
    return _gemma4(
        layers, hidden, 8, groups, ffn, 512, hidden_size_per_layer_input=256, max_position_embeddings=131072, **keys
    )


def _large(layers: int, hidden: int, heads: int, groups: int, whole: int, ffn: int, **keys: Any) -> dict[str, Any]:
    """whole: key-value heads of global layers, whose keys are their values."""
    shared = {"num_global_query_groups": whole, "attention_k_eq_v": True, "max_position_embeddings": 262144}
    return _gemma4(layers, hidden, heads, groups, ffn, 1024, **shared, **keys)


PRESETS: dict[str, dict[str, Any]] = {
    "gemma4-e2b": _small(
        35, 1536, 1, 6144, sliding_window_pattern=5, num_kv_shared_layers=20, use_double_wide_mlp=True
    ),
    "gemma4-e4b": _small(42, 2560, 2, 10240, num_kv_shared_layers=18),
    "gemma4-12b": _large(48, 3840, 16, 8, 1, 15360),
    "gemma4-31b": _large(60, 5376, 32, 16, 4, 21504),
    "gemma4-26b-a4b": _large(
        30,
        2816,
        16,
        8,
        2,
        2112,
        moe={
            "num_experts": 128,
            "moe_router_topk": 8,
            "moe_ffn_hidden_size": 704,
            "moe_router_expert_scale": True,
            "moe_router_load_balancing_type": ["none"],
        },
    ),
}
