"""Shapes of the Mamba-2 models, as published."""

from __future__ import annotations

from typing import Any


def _mamba2(layers: int, hidden: int) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "vocab_size": 50288,  # GPT-NeoX's 50277, rounded up to a multiple of 16 in the published weights
            "mamba_num_groups": 1,
            "mamba_chunk_size": 256,
            "untie_embeddings_and_output_weights": False,
            "fp32_residual_connection": True,
        },
        "data": {"seq_length": 2048},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "mamba2-130m": _mamba2(24, 768),
    "mamba2-370m": _mamba2(48, 1024),
    "mamba2-780m": _mamba2(48, 1536),
    "mamba2-1.3b": _mamba2(48, 2048),
    "mamba2-2.7b": _mamba2(64, 2560),
}
