"""LLaVA 1.5: CLIP's large tower at 336 pixels, a two-layer projection, Vicuna (which is Llama 2)."""

from __future__ import annotations

from typing import Any

from mt_models.vision.presets import CLIP_LARGE_336


def _llava15(layers: int, hidden: int, heads: int, ffn: int) -> dict[str, Any]:
    decoder = {
        "family": "llama",
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": ffn,
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
    }
    return {
        "model": {
            "vision_model": CLIP_LARGE_336,
            "language_model": decoder,
            # 32000 tokens, the image token, the padding, and the rest of a multiple of 64.
            "vocab_size": 32064,
            "image_token_index": 32000,
        },
        "data": {"seq_length": 2048},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "llava-1.5-7b": _llava15(32, 4096, 32, 11008),
    "llava-1.5-13b": _llava15(40, 5120, 40, 13824),
}
