"""Configuration of dense ERNIE 4.5 models, and their published size."""

from __future__ import annotations

from typing import Any

from mt_core.config_map import MegatronMap
from mt_models.blocks.config import RMSNormDecoderConfig


class Ernie45Config(RMSNormDecoderConfig):
    """ERNIE 4.5, dense (Baidu, 2025)."""

    use_bias: bool = False
    """Biases in all linear layers."""

    @property
    def rotary_interleaved(self) -> bool:
        return True

    @property
    def add_bias_linear(self) -> bool:
        return self.use_bias

    @property
    def add_qkv_bias(self) -> bool:
        return self.use_bias

    @property
    def qk_layernorm(self) -> bool:
        return False


# -- published size ----------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "ernie-4.5-0.3b": {
        "model": {
            "num_layers": 18,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "num_query_groups": 2,
            "kv_channels": 128,
            "ffn_hidden_size": 3072,
            "vocab_size": 103424,
            "norm_epsilon": 1e-5,
            "max_position_embeddings": 131072,
            "rotary_base": 500000.0,
            "untie_embeddings_and_output_weights": False,
        },
        "data": {"seq_length": 4096},
    },
}


MEGATRON = MegatronMap(
    unsupported="no checkpoint with rotary positions on adjacent channels (rotary_interleaved) has been compared with "
    "this family"
)
