"""Floating-point operations of a decoder with gated delta nets and attention for each token, counted as in
`mt_models.flops`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mt_models.blocks.delta_net_config import (
    delta_convolution_flops,
    delta_projection_flops,
    delta_rule_flops,
    linear_layers,
)
from mt_models.blocks.flop_convention import Convention
from mt_models.flops import Flops, core_flops, mean_keys, output_flops


@dataclass(frozen=True)
class DeltaNetFlops(Flops):
    """Forward FLOPs for each token, over all layers of a decoder with gated delta nets."""

    linear_projections: float
    """Into and out of the gated delta nets."""
    linear_convolution: float
    linear_rule: float
    """The delta rule."""
    attention_projections: float
    """Queries, gates, keys, values and the output of attention."""
    attention_core: float
    """Scores and their product with the values."""
    feed_forward: float
    output: float
    """Logits."""


def delta_net_flops(
    config: Any, seq_length: int, convention: Convention, *, projections: float, feed_forward: float
) -> DeltaNetFlops:
    """The mean over the tokens of a sequence. projections: of a layer's attention; feed_forward: of a layer. Raises
    ConfigError when the vocabulary is unknown."""
    linear = sum(linear_layers(config))
    attention = config.num_layers - linear
    return DeltaNetFlops(
        linear_projections=linear * delta_projection_flops(config.hidden_size, config),
        linear_convolution=linear * delta_convolution_flops(config),
        linear_rule=linear * delta_rule_flops(config, seq_length, convention),
        attention_projections=attention * projections,
        attention_core=attention * core_flops(config, mean_keys(seq_length, None, convention)),
        feed_forward=config.num_layers * feed_forward,
        output=output_flops(config.hidden_size, config.vocab_size),
    )
