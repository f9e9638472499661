"""Configuration of the Granite-MoE family."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from mt_core.config.schema import Config
from mt_models.blocks.decoder_config import DecoderConfig, check_decoder
from mt_models.blocks.moe import MoEOptions

Factor = Annotated[float, Field(gt=0)]


class GraniteMoeConfig(DecoderConfig):
    """Granite 3.0 and 3.1 MoE (IBM, 2024)."""

    moe: dict[str, Any]
    """Options of the MoE layers; num_experts has to be set."""
    embedding_multiplier: Factor = 1.0
    """Of token embeddings."""
    attention_multiplier: Factor | None = None
    """Of the products of queries and keys. Default: 1 / sqrt(head size)."""
    residual_multiplier: Factor = 1.0
    """Of what attention and feed-forward add to the residual stream."""
    logits_scaling: Factor = 1.0
    """Logits are divided by this."""

    @property
    def add_qkv_bias(self) -> bool:
        return False

    @property
    def qk_layernorm(self) -> bool:
        return False


def check_granite_moe(config: Config) -> None:
    check_decoder(config)
    model = config.model
    assert isinstance(model, GraniteMoeConfig)
    MoEOptions(model)
