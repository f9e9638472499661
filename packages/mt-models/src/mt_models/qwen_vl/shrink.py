"""A small Qwen2.5-VL for checks: cells of few pixels, windows of two cells. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def shrink_qwen_vl(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """Both kinds of attention stay. The image token is behind every vocabulary."""
    tower, decoder = dict(model["vision_model"]), dict(model["language_model"])
    merge = tower["spatial_merge_size"]
    tower |= {"patch_dim": 2, "window_size": 4 * merge, "full_attention_layers": [tower["num_layers"] - 1]}
    heads = decoder.get("kv_channels") or decoder["hidden_size"] // decoder["num_attention_heads"]
    height = heads // 2 // 3
    decoder["mrope_section"] = [heads // 2 - 2 * height, height, height]
    return {
        "vision_model": tower,
        "language_model": decoder,
        "image_token_index": max(model["image_token_index"], 100_000),
    }
