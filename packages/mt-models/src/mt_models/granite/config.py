"""Configuration of dense Granite models, and their published sizes; the factors that MoE ones have too."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from mt_core.config_map import MegatronMap
from mt_models.blocks.config import RMSNormDecoderConfig
from mt_models.granite.megatron import granite_arguments

Factor = Annotated[float, Field(gt=0)]


class GraniteFactorsConfig(RMSNormDecoderConfig):
    """The factors of all Granite models."""

    embedding_multiplier: Factor = 1.0
    """Factor of token embeddings."""
    attention_multiplier: Factor | None = None
    """Factor of the products of queries and keys. Default: 1 / sqrt(head size)."""
    residual_multiplier: Factor = 1.0
    """Factor of what attention and feed-forward add to the residual stream."""
    logits_scaling: Factor = 1.0
    """Logits are divided by this."""

    @property
    def qk_layernorm(self) -> bool:
        return False


class GraniteConfig(GraniteFactorsConfig):
    """Granite 3.0 to 3.3, dense (IBM, 2024 and 2025)."""

    attention_bias: bool = False
    """Biases on queries, keys, values and the output of attention."""
    mlp_bias: bool = False
    """Biases in the feed-forward."""

    @property
    def add_bias_linear(self) -> bool:
        return self.mlp_bias

    @property
    def add_qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def add_attention_output_bias(self) -> bool:
        return self.attention_bias


# -- published sizes ---------------------------------------------------------------------------------


def _granite(hidden: int, ffn: int, vocab: int, scores: float, logits: float, **keys: Any) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": 40,
            "hidden_size": hidden,
            "num_attention_heads": 32,
            "num_query_groups": 8,
            "ffn_hidden_size": ffn,
            "vocab_size": vocab,
            "norm_epsilon": 1e-5,
            "untie_embeddings_and_output_weights": False,
            "embedding_multiplier": 12.0,
            "attention_multiplier": scores,
            "residual_multiplier": 0.22,
            "logits_scaling": logits,
            **keys,
        },
        "data": {"seq_length": 4096},
    }


_LONG = {"max_position_embeddings": 131072, "rotary_base": 10000000.0}
PRESETS: dict[str, dict[str, Any]] = {
    "granite-3.0-2b": _granite(2048, 8192, 49155, 0.015625, 8.0),
    "granite-3.0-8b": _granite(4096, 12800, 49155, 0.0078125, 16.0),
    "granite-3.3-2b": _granite(2048, 8192, 49159, 0.015625, 8.0, **_LONG),
    "granite-3.3-8b": _granite(4096, 12800, 49159, 0.0078125, 16.0, **_LONG),
}


# A model without the factors is read as a Llama.
MEGATRON = MegatronMap(arguments=granite_arguments)
