"""Configuration of the Qwen-MoE family."""

from __future__ import annotations

from typing import Any

from mt_core.config.schema import Config
from mt_models.blocks.decoder_config import DecoderConfig, check_decoder
from mt_models.blocks.moe import MoEOptions


class QwenMoeConfig(DecoderConfig):
    """Qwen1.5-MoE (2024), Qwen2-57B-A14B (2024) and Qwen3-MoE (2025)."""

    add_qkv_bias: bool = False
    """Biases on queries, keys and values: Qwen2."""
    qk_layernorm: bool = True
    """Normalize each query and key head before positions are applied: Qwen3."""
    moe: dict[str, Any]
    """Options of the MoE layers; num_experts has to be set."""


def check_qwen_moe(config: Config) -> None:
    check_decoder(config)
    model = config.model
    assert isinstance(model, QwenMoeConfig)
    MoEOptions(model)
