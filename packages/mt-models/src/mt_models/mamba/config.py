"""Configuration of the Mamba family."""

from __future__ import annotations

import math
from typing import Literal

from mt_core.config.schema import Config, PositiveInt
from mt_models.blocks.mamba_config import MambaLayerConfig, check_mamba_layers


class MambaConfig(MambaLayerConfig):
    """Mamba-2 (Dao and Gu, 2024)."""

    num_layers: PositiveInt
    """Mamba layers."""

    @property
    def output_init_std(self) -> float:
        return self.init_method_std / math.sqrt(self.num_layers if self.use_scaled_init_method else 1.0)

    @property
    def normalization(self) -> Literal["RMSNorm"]:
        return "RMSNorm"


def check_mamba(config: Config) -> None:
    check_mamba_layers(config)
