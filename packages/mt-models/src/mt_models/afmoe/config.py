"""Configuration of AFMoE, and its published sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from mt_core.config.fields import PositiveInt
from mt_core.config.layer_pattern import read_pattern
from mt_core.config_map import MegatronMap
from mt_models.blocks.config import RMSNormDecoderConfig

WINDOW_PATTERN = "model.window_attn_skip_freq"


class AfmoeConfig(RMSNormDecoderConfig):
    """AFMoE: Trinity Nano, Mini and Large (Arcee AI, 2025 and 2026)."""

    moe: dict[str, Any]
    """Options of the MoE layers; num_experts has to be set."""
    norm_epsilon: Annotated[float, Field(ge=0)] = 1e-5
    """Added to the mean square."""
    sliding_window: PositiveInt = 2048
    """In layers with a window a position sees itself and the sliding_window - 1 before it, and queries and keys are
    rotated. Layers without a window have no positions."""
    window_attn_skip_freq: PositiveInt | str = 4
    """Every so many layers one sees everything before it, and the others have the window (1: none has it); or a pattern
    such as "([1]*3+[0]*1)" with a 1 for each layer with the window."""
    mup_enabled: bool = True
    """Token embeddings are multiplied by sqrt(hidden_size)."""

    @property
    def layers_with_window(self) -> list[bool]:
        """For each layer whether it has the window. Raises ConfigError for a pattern that is none."""
        freq = self.window_attn_skip_freq
        if isinstance(freq, int):
            return [(layer + 1) % freq != 0 for layer in range(self.num_layers)]
        return read_pattern(freq, self.num_layers, WINDOW_PATTERN)

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if self.layers_with_window[layer] else None

    def rotates(self, layer: int) -> bool:
        return self.layers_with_window[layer]

    @property
    def add_qkv_bias(self) -> bool:
        return False

    @property
    def qk_layernorm(self) -> bool:
        return True


def shrink_afmoe(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """See `ModelSpec.shrink`: a layer with a window, then one without, and so on."""
    return {"sliding_window": max(seq_length // 2, 1), "window_attn_skip_freq": 2}


# -- published sizes ---------------------------------------------------------------------------------


def _trinity(
    layers: int, hidden: int, heads: int, groups: int, ffn: int, window: int, moe: dict[str, Any]
) -> dict[str, Any]:
    dense, width = moe.pop("dense"), moe["moe_ffn_hidden_size"]
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "kv_channels": 128,
            "ffn_hidden_size": ffn,
            "sliding_window": window,
            "vocab_size": 200192,
            "max_position_embeddings": 131072,
            "moe": {
                **moe,
                "moe_layer_freq": f"([0]*{dense}+[1]*{layers - dense})",
                "moe_shared_expert_intermediate_size": width,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_load_balancing_type": ["none"],
            },
        },
        "data": {"seq_length": 4096},
    }


def _experts(dense: int, number: int, topk: int, width: int, scale: float) -> dict[str, Any]:
    return {
        "dense": dense,
        "num_experts": number,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": width,
        "moe_router_topk_scaling_factor": scale,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "trinity-nano": _trinity(56, 1024, 8, 2, 3072, 2048, _experts(2, 128, 8, 256, 2.826)),
    "trinity-mini": _trinity(32, 2048, 32, 4, 6144, 2048, _experts(2, 128, 8, 1024, 2.826)),
    "trinity-large": _trinity(60, 3072, 48, 8, 12288, 4096, _experts(6, 256, 4, 3072, 2.448)),
}

MEGATRON = MegatronMap(unsupported="Megatron has no norms behind attention and feed-forward")
