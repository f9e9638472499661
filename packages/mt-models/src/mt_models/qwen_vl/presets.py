"""Shapes of Qwen2.5-VL, as published."""

from __future__ import annotations

from typing import Any

LAYERS = {"num_layers": 32, "hidden_size": 1280, "num_attention_heads": 16}


def _qwen25_vl(
    layers: int,
    hidden: int,
    heads: int,
    groups: int,
    ffn: int,
    vision_ffn: int,
    *,
    vocab: int = 152064,
    tied: bool = False,
) -> dict[str, Any]:
    return {
        "model": {
            "vision_model": {**LAYERS, "ffn_hidden_size": vision_ffn},
            "language_model": {
                "num_layers": layers,
                "hidden_size": hidden,
                "num_attention_heads": heads,
                "num_query_groups": groups,
                "ffn_hidden_size": ffn,
                "untie_embeddings_and_output_weights": not tied,
            },
            "vocab_size": vocab,
            "image_token_index": 151655,
        },
        "data": {"seq_length": 4096},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "qwen2.5-vl-3b": _qwen25_vl(36, 2048, 16, 2, 11008, 3420, vocab=151936, tied=True),
    "qwen2.5-vl-7b": _qwen25_vl(28, 3584, 28, 4, 18944, 3420),
    "qwen2.5-vl-32b": _qwen25_vl(64, 5120, 40, 8, 27648, 3456),
    "qwen2.5-vl-72b": _qwen25_vl(80, 8192, 64, 8, 29568, 3456),
}
