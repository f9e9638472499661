"""Configuration of the Mistral family."""

from __future__ import annotations

from mt_core.config.schema import Config, PositiveInt
from mt_models.blocks.decoder_config import DecoderConfig, check_decoder


class MistralConfig(DecoderConfig):
    """Mistral 7B (Jiang et al., 2023)."""

    sliding_window: PositiveInt | None = None
    """A position sees itself and the sliding_window - 1 before it. Default: all before it."""

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window

    @property
    def add_qkv_bias(self) -> bool:
        return False

    @property
    def qk_layernorm(self) -> bool:
        return False


def check_mistral(config: Config) -> None:
    check_decoder(config)
