"""Configuration of Seed-OSS, and its published size."""

from __future__ import annotations

from typing import Any

from mt_core.config.fields import Probability
from mt_core.config_map import MegatronMap
from mt_models.blocks.config import RMSNormDecoderConfig


class SeedOssConfig(RMSNormDecoderConfig):
    """Seed-OSS 36B (ByteDance, 2025)."""

    attention_bias: bool = True
    """Biases on queries, keys and values."""
    attention_out_bias: bool = False
    """A bias on the output of attention."""
    mlp_bias: bool = False
    """Biases in the feed-forward."""
    residual_dropout: Probability = 0.0
    """Dropout on what attention and feed-forward add to the residual stream."""

    @property
    def hidden_dropout(self) -> float:
        return self.residual_dropout

    @property
    def add_bias_linear(self) -> bool:
        return self.mlp_bias

    @property
    def add_qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def add_attention_output_bias(self) -> bool:
        return self.attention_out_bias

    @property
    def qk_layernorm(self) -> bool:
        return False


# -- published size ----------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "seed-oss-36b": {
        "model": {
            "num_layers": 64,
            "hidden_size": 5120,
            "num_attention_heads": 80,
            "num_query_groups": 8,
            "kv_channels": 128,
            "ffn_hidden_size": 27648,
            "vocab_size": 155136,
            "max_position_embeddings": 524288,
            "rotary_base": 10000000.0,
        },
        "data": {"seq_length": 4096},
    },
}


MEGATRON = MegatronMap(unsupported="no checkpoint of Megatron's has been compared with this family")
