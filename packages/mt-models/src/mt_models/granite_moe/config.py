"""Configuration of the Granite-MoE family, and its published sizes."""

from __future__ import annotations

from typing import Any

from mt_core.config_map import MegatronMap
from mt_models.granite.config import GraniteFactorsConfig
from mt_models.granite.megatron import granite_arguments


class GraniteMoeConfig(GraniteFactorsConfig):
    """Granite 3.0 and 3.1 MoE (IBM, 2024)."""

    moe: dict[str, Any]
    """Options of the MoE layers; num_experts has to be set."""

    @property
    def add_qkv_bias(self) -> bool:
        return False


# -- published sizes ---------------------------------------------------------------------------------


def _granite(layers: int, hidden: int, heads: int, experts: int, residual: float, logits: float) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": 8,
            "ffn_hidden_size": 512,
            "max_position_embeddings": 4096,
            "vocab_size": 49155,
            "untie_embeddings_and_output_weights": False,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.015625,
            "residual_multiplier": residual,
            "logits_scaling": logits,
            "moe": {
                "num_experts": experts,
                "moe_router_topk": 8,
                "moe_router_load_balancing_type": ["aux_loss"],
                "moe_aux_loss_coeff": [0.0],
            },
        },
        "data": {"seq_length": 4096},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "granite-3.0-1b-a400m": _granite(24, 1024, 16, 32, 0.22, 6.0),
    "granite-3.0-3b-a800m": _granite(32, 1536, 24, 40, 0.22, 6.0),
}


# A model without the factors is read as a Mixtral.
MEGATRON = MegatronMap(arguments=granite_arguments)
