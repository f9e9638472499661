"""Configuration of Phi-3 and Phi-4, and their published sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mt_core.config.fields import PositiveInt, Probability
from mt_core.config_map import MegatronMap
from mt_models.blocks.config import PartialRotaryConfig
from mt_models.blocks.megatron import require
from mt_models.blocks.megatron_decoder import rotary_arguments


class Phi3Config(PartialRotaryConfig):
    """Phi-3 (Abdin et al., 2024), Phi-4 (2024) and Phi-4-mini (2025)."""

    sliding_window: PositiveInt | None = None
    """A position sees itself and the sliding_window - 1 before it. Default: all before it."""
    residual_dropout: Probability = 0.0
    """Dropout on what attention and feed-forward add to the residual stream."""

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window

    @property
    def hidden_dropout(self) -> float:
        return self.residual_dropout

    @property
    def add_qkv_bias(self) -> bool:
        return False

    @property
    def qk_layernorm(self) -> bool:
        return False


# -- published sizes ---------------------------------------------------------------------------------


def _phi(layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, **keys: Any) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "ffn_hidden_size": ffn,
            "vocab_size": vocab,
            "norm_epsilon": 1e-5,
            **keys,
        },
        "data": {"seq_length": 4096},
    }


PHI4_MINI_LONG = [
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
    2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
    6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215,
    18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64,
    32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
]  # fmt: skip
_WINDOW = {"max_position_embeddings": 4096, "sliding_window": 2047}
PRESETS: dict[str, dict[str, Any]] = {
    "phi-3-mini-4k": _phi(32, 3072, 32, 32, 8192, 32064, **_WINDOW),
    "phi-3-medium-4k": _phi(40, 5120, 40, 10, 17920, 32064, **_WINDOW),
    "phi-4": _phi(40, 5120, 40, 10, 17920, 100352, max_position_embeddings=16384, rotary_base=250000.0),
    "phi-4-mini": _phi(
        32,
        3072,
        24,
        8,
        8192,
        200064,
        max_position_embeddings=131072,
        sliding_window=262144,
        rotary_percent=0.75,
        untie_embeddings_and_output_weights=False,
        rope_scaling_type="longrope",
        original_max_position_embeddings=4096,
        rope_short_factor=[1.0] * 48,
        rope_long_factor=PHI4_MINI_LONG,
    ),
}


def phi3_arguments(model: Any, parameters: Collection[str], kept: Mapping[str, Any]) -> dict[str, Any]:
    """A model without longrope is a Llama to Megatron, or a Mistral."""
    require(model, "residual_dropout", (0.0,))
    return rotary_arguments(model, parameters, kept)


MEGATRON = MegatronMap(arguments=phi3_arguments)
