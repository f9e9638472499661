"""Published shapes: T5, T5 1.1, and Megatron's T5."""

from __future__ import annotations

from typing import Any


def _t5(layers: int, hidden: int, ffn: int, heads: int, head: int = 64, **keys: Any) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "ffn_hidden_size": ffn,
            "num_attention_heads": heads,
            "kv_channels": head,
            "vocab_size": 32128,
            **keys,
        },
        "data": {"seq_length": 512},
    }


def _t5_1_1(layers: int, hidden: int, ffn: int, heads: int) -> dict[str, Any]:
    return _t5(layers, hidden, ffn, heads, activation="geglu_tanh", untie_embeddings_and_output_weights=True)


MEGATRON: dict[str, Any] = {
    "position_embedding_type": "learned_absolute",
    "max_position_embeddings": 512,
    "normalization": "LayerNorm",
    "norm_epsilon": 1e-5,
    "activation": "gelu",
    "add_bias_linear": True,
    "scale_attention_scores": True,
    "scale_output": False,
    "add_output_bias": True,
}

PRESETS: dict[str, dict[str, Any]] = {
    "t5-small": _t5(6, 512, 2048, 8),
    "t5-base": _t5(12, 768, 3072, 12),
    "t5-large": _t5(24, 1024, 4096, 16),
    "t5-3b": _t5(24, 1024, 16384, 32, 128),
    "t5-11b": _t5(24, 1024, 65536, 128, 128),
    "t5-v1.1-small": _t5_1_1(8, 512, 1024, 6),
    "t5-v1.1-base": _t5_1_1(12, 768, 2048, 12),
    "t5-v1.1-large": _t5_1_1(24, 1024, 2816, 16),
    "t5-v1.1-xl": _t5_1_1(24, 2048, 5120, 32),
    "t5-v1.1-xxl": _t5_1_1(24, 4096, 10240, 64),
    "megatron-t5-220m": _t5(12, 768, 3072, 12, **MEGATRON),
}
