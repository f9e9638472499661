"""FLOPs of Ling 3.0 for each token (counted as in mt_models.flops)."""

from __future__ import annotations

from typing import Any

from mt_core.config.schema import Config
from mt_models.bailing_hybrid.config import BailingHybridConfig
from mt_models.delta_net_flops import DeltaNetFlops
from mt_models.flops import Convention
from mt_models.kimi_linear.flops import kimi_flops, prediction_flops


def flops_per_token(config: BailingHybridConfig, seq_length: int, *, convention: Convention = "seen") -> DeltaNetFlops:
    """The mean over the tokens of a sequence. Raises ConfigError when the vocabulary is unknown."""
    gate = 2.0 * config.hidden_size * config.num_attention_heads
    return kimi_flops(config, seq_length, convention, linear=linear_projection_flops(config), gate=gate)


def linear_projection_flops(config: BailingHybridConfig) -> float:
    """FLOPs of one layer's projections: q, k, v, b, decays and gates in, values out."""
    hidden, width = config.hidden_size, config.linear_key_size
    return 2.0 * hidden * (6 * width + config.linear_num_key_heads)


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model: Any = config.model
    length = config.data.seq_length

    def training(counted: BailingHybridConfig) -> float:
        return flops_per_token(counted, length).training

    return length * (training(model) + prediction_flops(model, training))
