"""Configuration of the Mistral family, and its published sizes."""

from __future__ import annotations

from typing import Any

from mt_core.config.fields import PositiveInt
from mt_models.blocks.config import RMSNormDecoderConfig
from mt_models.blocks.megatron_decoder import rotary_map


class MistralConfig(RMSNormDecoderConfig):
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


# -- published sizes ---------------------------------------------------------------------------------


def _mistral_7b(vocab: int, **keys: Any) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_query_groups": 8,
            "ffn_hidden_size": 14336,
            "max_position_embeddings": 32768,
            "norm_epsilon": 1e-5,
            "vocab_size": vocab,
            **keys,
        },
        "data": {"seq_length": 8192},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "mistral-7b-v0.1": _mistral_7b(32000, sliding_window=4096),
    "mistral-7b-v0.2": _mistral_7b(32000, rotary_base=1000000.0),
    "mistral-7b-v0.3": _mistral_7b(32768, rotary_base=1000000.0),
}


MEGATRON = rotary_map("mistral")
