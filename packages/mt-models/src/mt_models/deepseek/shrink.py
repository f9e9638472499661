"""A small DeepSeek for checks: the sizes of its latents and heads. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SIZES = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}


def shrink_deepseek(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """q_lora_rank stays null if it is, since that is another code path."""
    return {key: size for key, size in SIZES.items() if model[key]}
