"""Megatron's arguments for Granite models, whose factors have none."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mt_models.blocks.megatron import require
from mt_models.blocks.megatron_decoder import rotary_arguments

NEUTRAL: Mapping[str, Any] = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
"""Granite's factors, when they change nothing."""


def granite_arguments(model: Any, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Granite's factors have no arguments; a model without them is a Llama or a Mixtral."""
    for key, neutral in NEUTRAL.items():
        require(model, key, (neutral,))
    # None: head_dim ** -0.5 by default.
    require(model, "attention_multiplier", (None, model.head_dim**-0.5))
    return rotary_arguments(model, parameters, kept)
