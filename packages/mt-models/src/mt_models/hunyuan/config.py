"""Configuration of Hunyuan, and its published sizes."""

from __future__ import annotations

from typing import Any

from mt_core.config_map import MegatronMap
from mt_models.blocks.config import RMSNormDecoderConfig


class HunyuanConfig(RMSNormDecoderConfig):
    """Hunyuan 0.5B to 7B and Hunyuan-A13B (Tencent, 2025)."""

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


def _hunyuan(layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, **keys: Any) -> dict[str, Any]:
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
            **keys,
        },
        "data": {"seq_length": 4096},
    }


A13B = {
    "num_experts": 64,
    "moe_router_topk": 8,
    "moe_shared_expert_intermediate_size": 3072,
    "moe_router_load_balancing_type": ["aux_loss"],
    "moe_aux_loss_coeff": [0.001],
}
PRESETS: dict[str, dict[str, Any]] = {
    "hunyuan-0.5b": _hunyuan(24, 1024, 8, 4, 3584, 120818),
    "hunyuan-1.8b": _hunyuan(32, 2048, 16, 4, 6144, 120818),
    "hunyuan-4b": _hunyuan(36, 3072, 32, 8, 8192, 120818),
    "hunyuan-7b": _hunyuan(32, 4096, 32, 8, 14336, 128167),
    "hunyuan-a13b": _hunyuan(32, 4096, 32, 8, 3072, 128167, moe=A13B),
}


MEGATRON = MegatronMap(unsupported="Megatron normalizes queries and keys before it rotates them, this family behind")
