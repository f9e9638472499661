"""Floating-point operations of a hybrid for each token, from its configuration.

Counted as for transformers (mt_models.flops) and Mamba (mt_models.mamba.flops), each layer by its kind.
"""

from __future__ import annotations

from dataclasses import dataclass

from mt_core.errors import ConfigError
from mt_core.nn.activations import is_gated
from mt_models.flops import Convention, Flops
from mt_models.hybrid.config import HybridConfig
from mt_models.hybrid.pattern import ATTENTION, EXPERTS, FEED_FORWARD, MAMBA
from mt_models.mamba.flops import convolution_flops, output_flops, projection_flops, scan_flops


@dataclass(frozen=True)
class HybridFlops(Flops):
    """Forward FLOPs for each token, over all layers."""

    mamba_projections: float
    mamba_convolution: float
    mamba_scan: float
    attention_projections: float
    """Queries, keys, values and the output of attention."""
    attention_core: float
    """Scores and their product with the values."""
    feed_forward: float
    """Experts included."""
    output: float
    """Logits."""


def flops_per_token(
    config: HybridConfig, seq_length: int, *, convention: Convention = "seen", experts: float | None = None
) -> HybridFlops:
    """The mean over the tokens of a sequence.

    experts: forward FLOPs for each token of one layer of experts. Raises ConfigError when it is missing though the
    pattern has such layers, or the vocabulary is unknown.
    """
    count = config.layers.count
    if count(EXPERTS) and experts is None:
        raise ConfigError(
            "layers of experts (E) are counted by the plugin that brings them; pass their FLOPs as experts"
        )
    mamba, attention = count(MAMBA), count(ATTENTION)
    keys = seq_length if convention == "full" else (seq_length + 1) / 2
    heads = config.num_attention_heads * config.head_dim
    return HybridFlops(
        mamba_projections=mamba * projection_flops(config),
        mamba_convolution=mamba * convolution_flops(config),
        mamba_scan=mamba * scan_flops(config, seq_length, convention),
        attention_projections=attention * 4 * config.hidden_size * (heads + config.query_groups * config.head_dim),
        attention_core=attention * 4 * heads * keys,
        feed_forward=count(FEED_FORWARD) * feed_forward_flops(config) + count(EXPERTS) * (experts or 0.0),
        output=output_flops(config),
    )


def feed_forward_flops(config: HybridConfig) -> float:
    """Of one layer."""
    matrices = 3 if is_gated(config.activation) else 2
    return 2 * matrices * config.hidden_size * config.ffn_size
