"""Configuration of dense Hunyuan models, and their published sizes."""

from __future__ import annotations

from typing import Any

from mt_core.config_map import MegatronMap
from mt_models.blocks.config import RMSNormDecoderConfig


class HunyuanConfig(RMSNormDecoderConfig):
    """Hunyuan 0.5B to 7B (Tencent, 2025)."""

    attention_bias: bool = False
    """Biases on queries, keys, values and the output of attention."""

    @property
    def qk_layernorm_after_rotary(self) -> bool:
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


# -- published sizes ---------------------------------------------------------------------------------


def _hunyuan(layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "kv_channels": 128,
            "ffn_hidden_size": ffn,
            "vocab_size": vocab,
            "norm_epsilon": 1e-5,
            "max_position_embeddings": 262144,
            "rope_scaling_type": "ntk",
            "rope_ntk_alpha": 1000.0,
            "untie_embeddings_and_output_weights": False,
        },
        "data": {"seq_length": 4096},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "hunyuan-0.5b": _hunyuan(24, 1024, 8, 4, 3584, 120818),
    "hunyuan-1.8b": _hunyuan(32, 2048, 16, 4, 6144, 120818),
    "hunyuan-7b": _hunyuan(32, 4096, 32, 8, 14336, 128167),
}


MEGATRON = MegatronMap(unsupported="Megatron normalizes queries and keys before it rotates them, this family behind")
