"""InternVL3 with InternViT of 300 million parameters and Qwen 2.5."""

from __future__ import annotations

from typing import Any

INTERNVIT_300M = {
    "vision_model_type": "internvit",
    "num_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "img_h": 448,
    "img_w": 448,
    "patch_dim": 14,
    "activation": "gelu",
    "norm_epsilon": 1e-6,
}


def _internvl3(layers: int, hidden: int, heads: int, groups: int, ffn: int) -> dict[str, Any]:
    decoder = {
        "family": "qwen",
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "ffn_hidden_size": ffn,
        "add_qkv_bias": True,
        "qk_layernorm": False,
        "max_position_embeddings": 32768,
        "norm_epsilon": 1e-6,
        "rotary_base": 1_000_000,
        "rope_scaling_type": "dynamic",
        "rope_scaling_factor": 2.0,
        "untie_embeddings_and_output_weights": True,
    }
    return {
        "model": {
            "vision_model": INTERNVIT_300M,
            "language_model": decoder,
            "vocab_size": 151674,
            "image_token_index": 151667,
        },
        "data": {"seq_length": 4096},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "internvl3-1b": _internvl3(24, 896, 14, 2, 4864),
    "internvl3-2b": _internvl3(28, 1536, 12, 2, 8960),
    "internvl3-8b": _internvl3(28, 3584, 28, 4, 18944),
    "internvl3-14b": _internvl3(48, 5120, 40, 8, 13824),
}
