"""FLOPs of Kimi K3 for each token (counted as in mt_models.flops)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from mt_core.config.schema import Config
from mt_models.delta_net_flops import DeltaNetFlops
from mt_models.flops import Convention
from mt_models.kimi_k3.config import KimiK3Config
from mt_models.kimi_linear.flops import kimi_flops


@dataclass(frozen=True)
class ResidualFlops(DeltaNetFlops):
    """Forward FLOPs for each token, over all layers."""

    residuals: float = 0.0
    """Scores of the sources that blocks read, and their weighted means."""


def flops_per_token(config: KimiK3Config, seq_length: int, *, convention: Convention = "seen") -> ResidualFlops:
    """The mean over the tokens of a sequence. Raises ConfigError when the vocabulary is unknown."""
    gate = 2.0 * config.hidden_size * config.num_attention_heads * config.v_head_dim
    flops = kimi_flops(config, seq_length, convention, linear=linear_projection_flops(config), gate=gate)
    parts = {part.name: getattr(flops, part.name) for part in fields(flops)}
    return ResidualFlops(**parts, residuals=4.0 * config.hidden_size * sources_read(config))


def linear_projection_flops(config: KimiK3Config) -> float:
    """FLOPs of one layer's projections: q, k, v, b, decays and gates in, values out."""
    hidden, width, size = config.hidden_size, config.linear_key_size, config.linear_key_head_dim
    decays = hidden * size + size * width
    return 2.0 * (hidden * (4 * width + config.linear_num_key_heads) + decays + width * hidden)


def sources_read(config: KimiK3Config) -> int:
    """Sources that all blocks and the LM head read together."""
    layers = range(config.num_layers)
    attentions = sum(config.sources_before(layer) for layer in layers)
    # A feed-forward reads one more where a run begins with its layer.
    feed_forwards = sum(config.sources_before(layer) + config.begins_run(layer) for layer in layers)
    return attentions + feed_forwards + config.sources_before(config.num_layers)


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model: Any = config.model
    return config.data.seq_length * flops_per_token(model, config.data.seq_length).training
