"""Configuration of the Qwen family, and its published sizes."""

from __future__ import annotations

from typing import Any

from mt_core.config.fields import NonNegativeInt, PositiveInt
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_models.blocks.config import RMSNormDecoderConfig, check_decoder
from mt_models.blocks.megatron_decoder import rotary_map


class QwenConfig(RMSNormDecoderConfig):
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


# -- published sizes of the dense models (base) ------------------------------------------------------


def _qwen(
    layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, positions: int, **keys: Any
) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "ffn_hidden_size": ffn,
            "vocab_size": vocab,
            "max_position_embeddings": positions,
            "rotary_base": 1000000.0,
            **keys,
        },
        "data": {"seq_length": 4096},
    }


def _qwen2(layers: int, hidden: int, heads: int, groups: int, ffn: int, positions: int, **keys: Any) -> dict[str, Any]:
    """The small ones tie their embeddings, the large ones have a few more rows in theirs."""
    small = hidden <= 2048
    variant = {"add_qkv_bias": True, "qk_layernorm": False, "untie_embeddings_and_output_weights": not small}
    return _qwen(layers, hidden, heads, groups, ffn, 151936 if small else 152064, positions, **variant, **keys)


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, *, tied: bool) -> dict[str, Any]:
    variant = {"kv_channels": 128, "untie_embeddings_and_output_weights": not tied}
    return _qwen(layers, hidden, heads, 8, ffn, 151936, 32768, **variant)


PRESETS: dict[str, dict[str, Any]] = {
    "qwen2-0.5b": _qwen2(24, 896, 14, 2, 4864, 131072),
    "qwen2-1.5b": _qwen2(28, 1536, 12, 2, 8960, 131072),
    "qwen2-7b": _qwen2(28, 3584, 28, 4, 18944, 131072),
    "qwen2-72b": _qwen2(80, 8192, 64, 8, 29568, 131072, norm_epsilon=1e-5),
    "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, 32768),
    "qwen2.5-1.5b": _qwen2(28, 1536, 12, 2, 8960, 131072),
    "qwen2.5-3b": _qwen2(36, 2048, 16, 2, 11008, 32768),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18944, 131072),
    "qwen2.5-14b": _qwen2(48, 5120, 40, 8, 13824, 131072, norm_epsilon=1e-5),
    "qwen2.5-32b": _qwen2(64, 5120, 40, 8, 27648, 131072, norm_epsilon=1e-5),
    "qwen2.5-72b": _qwen2(80, 8192, 64, 8, 29568, 131072, norm_epsilon=1e-5),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288, tied=False),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408, tied=False),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600, tied=False),
}


MEGATRON = rotary_map("qwen")
