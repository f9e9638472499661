"""FLOPs of Kimi Linear for each token (counted as in mt_models.flops)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mt_core.config.schema import Config
from mt_models.blocks.delta_net_config import delta_convolution_flops, delta_rule_flops
from mt_models.deepseek.config import flops_per_token as latent_flops_per_token
from mt_models.delta_net_flops import DeltaNetFlops
from mt_models.flops import Convention, output_flops
from mt_models.kimi_linear.config import KimiLinearConfig


def flops_per_token(config: KimiLinearConfig, seq_length: int, *, convention: Convention = "seen") -> DeltaNetFlops:
    """The mean over the tokens of a sequence. Raises ConfigError when the vocabulary is unknown."""
    return kimi_flops(config, seq_length, convention, linear=linear_projection_flops(config))


def kimi_flops(
    config: KimiLinearConfig, seq_length: int, convention: Convention, *, linear: float, gate: float = 0.0
) -> DeltaNetFlops:
    """linear: of the projections of one layer of Kimi delta attention; gate: of that of the output of one of latent
    attention."""
    latent = latent_flops_per_token(config, seq_length, convention=convention)
    layers = sum(config.linear_layers)
    share = (config.num_layers - layers) / config.num_layers
    return DeltaNetFlops(
        linear_projections=layers * linear,
        linear_convolution=layers * delta_convolution_flops(config),
        linear_rule=layers * delta_rule_flops(config, seq_length, convention),
        attention_projections=share * latent.attention_projections + (config.num_layers - layers) * gate,
        attention_core=share * latent.attention_core,
        feed_forward=latent.feed_forward,
        output=latent.output,
    )


def prediction_flops(config: KimiLinearConfig, training: Callable[[Any], float]) -> float:
    """Forward and backward FLOPs for each token of layers of multi-token prediction, their projections and their
    logits. training: those of all layers of a configuration."""
    if not (depths := config.mtp_num_layers):
        return 0.0
    each = 4 * config.hidden_size**2 + output_flops(config.hidden_size, config.vocab_size)
    return training(config.with_predicted_layers()) - training(config) + 3 * depths * each


def linear_projection_flops(config: KimiLinearConfig) -> float:
    """FLOPs of one layer's projections: q, k, v, b, decays and gates in, values out."""
    hidden, width, size = config.hidden_size, config.linear_key_size, config.linear_key_head_dim
    low_rank = 2 * (hidden * size + size * width)
    return 2.0 * (hidden * (3 * width + config.linear_num_key_heads) + low_rank + width * hidden)


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model: Any = config.model
    return config.data.seq_length * flops_per_token(model, config.data.seq_length).training
