"""Configuration of LFM2, its published sizes, and its FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config.checks import must_divide
from mt_core.config.fields import PositiveInt
from mt_core.config.layer_pattern import pattern_of, read_pattern
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_models.blocks.config import RMSNormDecoderConfig, check_decoder

PATTERN = "model.conv_layer_pattern"


class Lfm2Config(RMSNormDecoderConfig):
    """LFM2 and LFM2.5, dense or with experts (Liquid AI, 2025 and 2026)."""

    conv_layer_pattern: str | None = None
    """A 1 for each layer with a convolution, a 0 for one with attention, such as "([1]*2+[0]*1)*5+[1]*1". Default: all
    layers have attention."""
    conv_kernel: PositiveInt = 3
    """Positions that a convolution sees: its own and those before it."""
    conv_bias: bool = False
    """Biases in layers with a convolution."""

    @property
    def conv_layers(self) -> list[bool]:
        """For each layer whether it has a convolution. Raises ConfigError for a pattern of another length."""
        if self.conv_layer_pattern is None:
            return [False] * self.num_layers
        return read_pattern(self.conv_layer_pattern, self.num_layers, PATTERN)

    @property
    def add_qkv_bias(self) -> bool:
        return False

    @property
    def qk_layernorm(self) -> bool:
        return True


def check_lfm2(config: Config) -> None:
    check_decoder(config)
    model, parallel = config.model, config.parallel
    assert isinstance(model, Lfm2Config)
    if any(model.conv_layers):
        # Ranks hold channels of the convolutions, and exchange positions for them.
        size = parallel.tensor_model_parallel_size * parallel.context_parallel_size
        key = "parallel.tensor_model_parallel_size x parallel.context_parallel_size"
        must_divide(key, size, "model.hidden_size", model.hidden_size)


def shrink_lfm2(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """See `ModelSpec.shrink`: convolutions and attention by turns."""
    if model.get("conv_layer_pattern") is None:
        return {}
    return {"conv_layer_pattern": pattern_of([layer % 2 == 0 for layer in range(model["num_layers"])])}


# -- published sizes ---------------------------------------------------------------------------------


def _lfm2(layers: int, hidden: int, heads: int, ffn: int, attention: tuple[int, ...], **keys: Any) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": 8,
            "ffn_hidden_size": ffn,
            "vocab_size": 65536,
            "norm_epsilon": 1e-5,
            "max_position_embeddings": 128000,
            "rotary_base": 1000000.0,
            "untie_embeddings_and_output_weights": False,
            "conv_layer_pattern": pattern_of([layer not in attention for layer in range(layers)]),
            **keys,
        },
        "data": {"seq_length": 4096},
    }


def _experts(number: int, width: int, layers: int) -> dict[str, Any]:
    return {
        "num_experts": number,
        "moe_router_topk": 4,
        "moe_router_score_function": "sigmoid",
        "moe_router_weight_epsilon": 1e-6,
        "moe_router_enable_expert_bias": True,
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": f"([0]*2+[1]*{layers - 2})",
    }


_SIX = (2, 5, 8, 10, 12, 14)
PRESETS: dict[str, dict[str, Any]] = {
    "lfm2-350m": _lfm2(16, 1024, 16, 4608, _SIX),
    "lfm2-700m": _lfm2(16, 1536, 24, 6912, _SIX),
    "lfm2-1.2b": _lfm2(16, 2048, 32, 8192, _SIX),
    "lfm2-2.6b": _lfm2(30, 2048, 32, 10752, (2, 5, 9, 13, 17, 21, 25, 28)),
    "lfm2-8b-a1b": _lfm2(24, 2048, 32, 7168, (2, 6, 10, 14, 18, 21), moe=_experts(32, 1792, 24)),
    "lfm2-24b-a2b": _lfm2(40, 2048, 32, 11776, tuple(range(2, 40, 4)), moe=_experts(64, 1536, 40)),
    "lfm2.5-8b-a1b": _lfm2(
        24, 2048, 32, 7168, (2, 6, 10, 14, 18, 21), moe=_experts(32, 1792, 24), vocab_size=128000, rotary_base=5000000.0
    ),
}


# -- FLOPs -------------------------------------------------------------------------------------------


def training_flops(config: Config) -> float:
    """FLOPs of training on a sample (`ModelSpec.training_flops`)."""
    from mt_models.flops import (
        core_flops,
        dense_feed_forward_flops,
        experts_flops,
        mean_keys,
        output_flops,
        projection_flops,
    )

    model, length = config.model, config.data.seq_length
    assert isinstance(model, Lfm2Config)
    convolutions = sum(model.conv_layers)
    attentions = model.num_layers - convolutions
    # in_proj to three times the width, out_proj, and k taps of each channel
    of_convolution = 8 * model.hidden_size**2 + 2 * model.conv_kernel * model.hidden_size
    of_attention = projection_flops(model) + core_flops(model, mean_keys(length, None, "seen"))
    of_feed_forward = experts_flops(model)
    if of_feed_forward is None:
        of_feed_forward = dense_feed_forward_flops(model)
    of_token = (
        convolutions * of_convolution
        + attentions * of_attention
        + model.num_layers * of_feed_forward
        + output_flops(model.hidden_size, model.vocab_size)
    )
    return 3 * length * of_token


MEGATRON = MegatronMap(unsupported="Megatron has no layers with short convolutions")
