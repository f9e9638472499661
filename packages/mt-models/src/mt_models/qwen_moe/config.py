"""Configuration of the Qwen-MoE family."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_models.blocks.decoder_config import DecoderConfig, check_decoder
from mt_models.blocks.moe import MoEOptions


class QwenMoeConfig(DecoderConfig):
    """Qwen1.5-MoE (2024), Qwen2-57B-A14B (2024) and Qwen3-MoE (2025)."""

    add_qkv_bias: bool = False
    """Biases on queries, keys and values: Qwen2."""
    qk_layernorm: bool = True
    """Normalize each query and key head before positions are applied: Qwen3."""
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of each head that is rotated: half of it in GLM-4.5."""
    moe: dict[str, Any]
    """Options of the MoE layers; num_experts has to be set."""

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_percent)

    @property
    def rotary_dim_key(self) -> str:
        if self.rotary_percent == 1.0:
            return super().rotary_dim_key
        return f"model.rotary_percent={self.rotary_percent} of {self.head_dim} channels"


def check_qwen_moe(config: Config) -> None:
    check_decoder(config)
    model = config.model
    assert isinstance(model, QwenMoeConfig)
    MoEOptions(model)
    if model.rotary_dim == 0:
        raise ConfigError(
            f"model.rotary_percent={model.rotary_percent} of {model.head_dim} channels leaves none to rotate; "
            f"at least {2 / model.head_dim:.3g} is needed"
        )
