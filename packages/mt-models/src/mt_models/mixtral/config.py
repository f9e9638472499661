"""Configuration of the Mixtral family, and its published sizes."""

from __future__ import annotations

from typing import Any

from mt_models.blocks.megatron_decoder import rotary_map
from mt_models.mistral.config import MistralConfig


class MixtralConfig(MistralConfig):
    """Mixtral 8x7B (Jiang et al., 2024)."""

    moe: dict[str, Any]
    """Options of the MoE layers; num_experts has to be set."""


# -- published sizes ---------------------------------------------------------------------------------


def _mixtral(layers: int, hidden: int, heads: int, ffn: int, vocab: int, positions: int) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": 8,
            "ffn_hidden_size": ffn,
            "max_position_embeddings": positions,
            "rotary_base": 1000000.0,
            "norm_epsilon": 1e-5,
            "vocab_size": vocab,
            "moe": {
                "num_experts": 8,
                "moe_router_topk": 2,
                "moe_router_load_balancing_type": ["aux_loss"],
                "moe_aux_loss_coeff": [0.02],
            },
        },
        "data": {"seq_length": 8192},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14336, 32000, 32768),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 16384, 32768, 65536),
}


MEGATRON = rotary_map("mixtral")
