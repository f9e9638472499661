"""Configuration of Ministral 3, and its published sizes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from mt_core.config_map import MegatronMap
from mt_models.blocks.config import QueryScaling
from mt_models.mistral.config import MistralConfig


class Ministral3Config(MistralConfig):
    """Ministral 3 (Mistral AI, 2025), text."""

    query_scaling_beta: Annotated[float, Field(ge=0)] = 0.1
    """Queries at position p are multiplied by 1 + beta ln(1 + floor(p / original_max_position_embeddings))."""

    def scales_queries(self, layer: int) -> bool:
        return self.query_scaling_beta > 0

    @property
    def query_scaling(self) -> QueryScaling:
        original = self.original_max_position_embeddings or self.max_position_embeddings
        return QueryScaling(self.query_scaling_beta, original)


# -- published sizes ---------------------------------------------------------------------------------


def _ministral(layers: int, hidden: int, ffn: int, **keys: Any) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": 32,
            "num_query_groups": 8,
            "kv_channels": 128,
            "ffn_hidden_size": ffn,
            "vocab_size": 131072,
            "norm_epsilon": 1e-5,
            "max_position_embeddings": 262144,
            "rotary_base": 1000000.0,
            "rope_scaling_type": "yarn",
            "rope_scaling_factor": 16.0,
            "original_max_position_embeddings": 16384,
            "rope_mscale": 1.0,
            "rope_mscale_all_dim": 1.0,
            **keys,
        },
        "data": {"seq_length": 4096},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "ministral3-3b": _ministral(26, 3072, 9216, untie_embeddings_and_output_weights=False),
    "ministral3-8b": _ministral(34, 4096, 14336),
    "ministral3-14b": _ministral(40, 5120, 16384, rotary_base=1000000000.0),
}


MEGATRON = MegatronMap(unsupported="Megatron has no queries that grow with their positions")
