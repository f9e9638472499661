"""Shapes of the Gemma models, as published (text only)."""

from __future__ import annotations

from typing import Any


def _gemma(
    layers: int, hidden: int, heads: int, groups: int, head: int, ffn: int, vocab: int, **keys: Any
) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "kv_channels": head,
            "ffn_hidden_size": ffn,
            "vocab_size": vocab,
            **keys,
        },
        "data": {"seq_length": 8192},
    }


def _gemma2(layers: int, hidden: int, heads: int, head: int, ffn: int, scalar: float) -> dict[str, Any]:
    own = {
        "max_position_embeddings": 8192,
        "rotary_base": 10000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "qk_layernorm": False,
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    return _gemma(layers, hidden, heads, heads // 2, head, ffn, 256000, **own)


def _gemma3_small(layers: int, hidden: int, ffn: int) -> dict[str, Any]:
    return _gemma(layers, hidden, 4, 1, 256, ffn, 262144, sliding_window=512, max_position_embeddings=32768)


def _gemma3(layers: int, hidden: int, heads: int, head: int, ffn: int, scalar: float = 256.0) -> dict[str, Any]:
    own = {
        "query_pre_attn_scalar": scalar,
        "rope_scaling_type": "linear",
        "rope_scaling_factor": 8.0,
        "max_position_embeddings": 131072,
    }
    return _gemma(layers, hidden, heads, heads // 2, head, ffn, 262208, **own)


PRESETS: dict[str, dict[str, Any]] = {
    "gemma2-2b": _gemma2(26, 2304, 8, 256, 9216, 256.0),
    "gemma2-9b": _gemma2(42, 3584, 16, 256, 14336, 256.0),
    "gemma2-27b": _gemma2(46, 4608, 32, 128, 36864, 144.0),
    "gemma3-270m": _gemma3_small(18, 640, 2048),
    "gemma3-1b": _gemma3_small(26, 1152, 6912),
    "gemma3-4b": _gemma3(34, 2560, 8, 256, 10240),
    "gemma3-12b": _gemma3(48, 3840, 16, 256, 15360),
    "gemma3-27b": _gemma3(62, 5376, 32, 128, 21504, 168.0),
}
