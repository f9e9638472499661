"""Configuration of OLMo 2 and 3, and their published sizes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from mt_core.config.fields import PositiveInt
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.config import RMSNormDecoderConfig, check_decoder
from mt_models.blocks.window_pattern import WindowPattern, has_window


class OlmoConfig(RMSNormDecoderConfig):
    """OLMo 2 (2 OLMo 2 Furious, 2025) and OLMo 3 (2025)."""

    attention_bias: bool = False
    """Biases on queries, keys, values and the output of attention."""
    sliding_window: PositiveInt | None = None
    """In layers with a window a position sees itself and the sliding_window - 1 before it: OLMo 3. Default: no
    window."""
    sliding_window_pattern: WindowPattern = 4
    """With a sliding window, every so many layers one sees everything before it; or a pattern with a 1 for each layer
    with the window, such as "([1]*3+[0]*2+[1]*1)"."""
    rotary_base_local: Annotated[float, Field(gt=0)] | None = None
    """Base of the rotary wavelengths of layers with a window, which are never scaled. Default: rotary_base."""

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if has_window(self.sliding_window_pattern, layer, self.num_layers) else None

    @property
    def rotary_base_in_windows(self) -> float | None:
        return None if self.sliding_window is None else self.rotary_base_local or self.rotary_base

    @property
    def norms_of_branches(self) -> bool:
        return True

    @property
    def qk_layernorm_over_heads(self) -> bool:
        return True

    @property
    def add_qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def add_attention_output_bias(self) -> bool:
        return self.attention_bias

    @property
    def qk_layernorm(self) -> bool:
        return True


def check_olmo(config: Config) -> None:
    check_decoder(config)
    model = config.model
    assert isinstance(model, OlmoConfig)
    if model.rotary_base_local is not None and model.sliding_window is None:
        raise ConfigError(
            f"model.rotary_base_local={model.rotary_base_local} would be ignored: it only counts when "
            "model.sliding_window is set"
        )


# -- published sizes ---------------------------------------------------------------------------------


def _olmo(layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, **keys: Any) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "ffn_hidden_size": ffn,
            "vocab_size": vocab,
            "max_position_embeddings": 4096,
            "rotary_base": 500000.0,
            **keys,
        },
        "data": {"seq_length": 4096},
    }


def _olmo3(layers: int, hidden: int, heads: int, groups: int, ffn: int) -> dict[str, Any]:
    long = {
        "max_position_embeddings": 65536,
        "sliding_window": 4096,
        "rope_scaling_type": "yarn",
        "rope_scaling_factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_attention_factor": 1.2079441541679836,
    }
    return _olmo(layers, hidden, heads, groups, ffn, 100278, **long)


PRESETS: dict[str, dict[str, Any]] = {
    "olmo2-1b": _olmo(16, 2048, 16, 16, 8192, 100352),
    "olmo2-7b": _olmo(32, 4096, 32, 32, 11008, 100352),
    "olmo2-13b": _olmo(40, 5120, 40, 40, 13824, 100352),
    "olmo2-32b": _olmo(64, 5120, 40, 8, 27648, 100352),
    "olmo3-7b": _olmo3(32, 4096, 32, 32, 11008),
    "olmo3-32b": _olmo3(64, 5120, 40, 8, 27648),
}


MEGATRON = MegatronMap(
    unsupported="Megatron has no layers without a norm before attention and feed-forward, and normalizes queries and "
    "keys head by head"
)
