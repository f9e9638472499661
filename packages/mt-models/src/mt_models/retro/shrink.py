"""A small RETRO for checks: its sizes depend on one another and on those of its samples. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHUNKS = 2
"""Of a short sequence, so that one of them reads what was found for the one before."""


def shrink_retro(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """A chunk is half of a sequence, and the last layer attends to neighbours."""
    return {
        "retro_chunk_length": seq_length // CHUNKS,
        "retro_cross_attention_layers": [model["num_layers"]],
        "retro_encoder_num_layers": 1,
        "max_position_embeddings": model["max_position_embeddings"] and seq_length * CHUNKS,
    }
