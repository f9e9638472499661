"""Shapes of hybrid models, as published."""

from __future__ import annotations

from typing import Any

_NEMOTRON_H_8B = "M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-"
_BAMBA = "".join("*-" if layer in (9, 18, 27) else "M-" for layer in range(32))

PRESETS: dict[str, dict[str, Any]] = {
    "nemotron-h-8b": {
        "model": {
            "hybrid_layer_pattern": _NEMOTRON_H_8B,
            "hidden_size": 4096,
            "vocab_size": 131072,
            "num_attention_heads": 32,
            "num_query_groups": 8,
            "kv_channels": 128,
            "ffn_hidden_size": 21504,
            "mamba_num_heads": 128,
        },
        "data": {"seq_length": 8192},
    },
    "bamba-9b": {
        "model": {
            "hybrid_layer_pattern": _BAMBA,
            "hidden_size": 4096,
            "vocab_size": 128256,
            "num_attention_heads": 32,
            "num_query_groups": 8,
            "position_embedding_type": "rope",
            "rotary_percent": 0.5,
            "ffn_hidden_size": 14336,
            "activation": "swiglu",
            "mamba_num_heads": 128,
            "mamba_num_groups": 1,
            "mamba_chunk_size": 256,
        },
        "data": {"seq_length": 4096},
    },
}
