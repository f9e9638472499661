"""Configuration of SmolLM3, and its published size."""

from __future__ import annotations

from typing import Any

from mt_core.config.fields import PositiveInt
from mt_core.config.layer_pattern import read_pattern
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_models.blocks.config import RMSNormDecoderConfig, check_decoder

NO_ROPE = "model.no_rope_freq"


class SmolLM3Config(RMSNormDecoderConfig):
    """SmolLM3 (Hugging Face, 2025)."""

    attention_bias: bool = False
    """Biases on queries, keys, values and the output of attention."""
    mlp_bias: bool = False
    """Biases in the feed-forward."""
    no_rope_freq: PositiveInt | str | None = 4
    """Every so many layers one has no rotary positions: layers n - 1, 2 n - 1, ...; or a pattern with a 1 for each
    layer without, such as "([0]*3+[1]*1)*9". null: all layers have them."""

    def rotates(self, layer: int) -> bool:
        return not self.layers_without_rope[layer]

    @property
    def layers_without_rope(self) -> list[bool]:
        """For each layer whether it has no rotary positions. Raises ConfigError for a pattern of another length."""
        freq = self.no_rope_freq
        if isinstance(freq, str):
            return read_pattern(freq, self.num_layers, NO_ROPE)
        return [freq is not None and (layer + 1) % freq == 0 for layer in range(self.num_layers)]

    @property
    def add_bias_linear(self) -> bool:
        return self.mlp_bias

    @property
    def add_qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def add_attention_output_bias(self) -> bool:
        return self.attention_bias

    @property
    def qk_layernorm(self) -> bool:
        return False


def check_smollm3(config: Config) -> None:
    check_decoder(config)
    assert isinstance(config.model, SmolLM3Config)
    _ = config.model.layers_without_rope  # raises for a pattern that does not fit


# -- published size ----------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "smollm3-3b": {
        "model": {
            "num_layers": 36,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_query_groups": 4,
            "ffn_hidden_size": 11008,
            "vocab_size": 128256,
            "max_position_embeddings": 65536,
            "rotary_base": 5000000.0,
            "untie_embeddings_and_output_weights": False,
        },
        "data": {"seq_length": 4096},
    },
}


MEGATRON = MegatronMap(unsupported="no checkpoint with Megatron's no_rope_freq has been compared with this family")
