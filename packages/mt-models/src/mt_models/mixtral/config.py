"""Configuration of the Mixtral family."""

from __future__ import annotations

from typing import Any

from mt_core.config.schema import Config
from mt_models.blocks.decoder_config import check_decoder
from mt_models.blocks.moe import MoEOptions
from mt_models.mistral.config import MistralConfig


class MixtralConfig(MistralConfig):
    """Mixtral 8x7B (Jiang et al., 2024)."""

    moe: dict[str, Any]
    """Options of the MoE layers; num_experts has to be set."""


def check_mixtral(config: Config) -> None:
    check_decoder(config)
    model = config.model
    assert isinstance(model, MixtralConfig)
    MoEOptions(model)
