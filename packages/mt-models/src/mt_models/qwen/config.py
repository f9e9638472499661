"""Configuration of the Qwen family."""

from __future__ import annotations

from mt_core.config.schema import Config, NonNegativeInt, PositiveInt
from mt_core.errors import ConfigError
from mt_models.blocks.decoder_config import DecoderConfig, check_decoder


class QwenConfig(DecoderConfig):
    """Qwen2 and Qwen2.5 (Technical Reports, 2024), Qwen3 (2025)."""

    add_qkv_bias: bool = False
    """Biases on queries, keys and values: Qwen2 and Qwen2.5."""
    qk_layernorm: bool = True
    """Normalize each query and key head before positions are applied: Qwen3."""
    sliding_window: PositiveInt | None = None
    """In layers with a window a position sees itself and the sliding_window - 1 before it. Default: no window."""
    max_window_layers: NonNegativeInt = 0
    """With a sliding window, the first so many layers still see everything."""

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if layer >= self.max_window_layers else None


def check_qwen(config: Config) -> None:
    check_decoder(config)
    model = config.model
    assert isinstance(model, QwenConfig)
    if model.max_window_layers and model.sliding_window is None:
        raise ConfigError(
            f"model.max_window_layers={model.max_window_layers} would be ignored: it only counts when "
            "model.sliding_window is set"
        )
    if model.max_window_layers > model.num_layers:
        raise ConfigError(
            f"model.max_window_layers={model.max_window_layers} is above model.num_layers={model.num_layers}"
        )
