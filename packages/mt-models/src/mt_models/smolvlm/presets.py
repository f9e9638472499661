"""SmolVLM (its second version has the shapes of the first but for the vocabulary of the largest) and Idefics3."""

from __future__ import annotations

from typing import Any

from mt_models.vision.presets import BASE, SO400M, siglip


def _preset(tower: dict[str, Any], decoder: dict[str, Any], **keys: int) -> dict[str, Any]:
    return {
        "model": {
            "vision_model": {**tower, "add_pooler": False},
            "language_model": {
                "family": "llama",
                "norm_epsilon": 1e-5,
                "untie_embeddings_and_output_weights": True,
                **decoder,
            },
            **keys,
        },
        "data": {"seq_length": 2048},
    }


def _smollm2(layers: int, hidden: int, heads: int, groups: int, ffn: int, **keys: int) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "ffn_hidden_size": ffn,
        "max_position_embeddings": 8192,
        "rotary_base": 100_000,
        **keys,
    }


LLAMA3_8B = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "max_position_embeddings": 10240,
    "rotary_base": 500_000,
}
SMALL_TOWER = siglip(BASE, 16, 512)
LARGE_TOWER = siglip(SO400M, 14, 384)
SMALL = {"vocab_size": 49280, "image_token_index": 49190, "scale_factor": 4}

PRESETS: dict[str, dict[str, Any]] = {
    "smolvlm-256m": _preset(SMALL_TOWER, _smollm2(30, 576, 9, 3, 1536), **SMALL),
    "smolvlm-500m": _preset(SMALL_TOWER, _smollm2(32, 960, 15, 5, 2560), **SMALL),
    "smolvlm-2.2b": _preset(
        LARGE_TOWER,
        _smollm2(24, 2048, 32, 32, 8192, max_position_embeddings=16384, rotary_base=273_768),
        vocab_size=49155,
        image_token_index=49153,
        scale_factor=3,
    ),
    "smolvlm2-2.2b": _preset(
        LARGE_TOWER,
        _smollm2(24, 2048, 32, 32, 8192, rotary_base=130_000),
        vocab_size=49280,
        image_token_index=49190,
        scale_factor=3,
    ),
    "idefics3-8b": _preset(
        siglip(SO400M, 14, 364), LLAMA3_8B, vocab_size=128259, image_token_index=128257, scale_factor=2
    ),
}
