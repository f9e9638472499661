"""Floating-point operations of Muse Glimmer and Muse Spark."""

from __future__ import annotations

from dataclasses import replace

from mt_core.config.schema import Config
from mt_models.flops import Convention, TokenFlops, experts_flops
from mt_models.flops import flops_per_token as decoder_flops
from mt_models.muse_glimmer.config import MuseGlimmerConfig


def flops_per_token(config: MuseGlimmerConfig, seq_length: int, *, convention: Convention = "seen") -> TokenFlops:
    """The mean over the tokens of a sequence. Raises ConfigError when the vocabulary is unknown."""
    flops = decoder_flops(config, seq_length, convention=convention, feed_forward=experts_flops(config))
    gates = 2 * config.hidden_size * config.num_attention_heads * config.head_dim
    return replace(flops, attention_projections=flops.attention_projections + config.num_layers * gates)


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model = config.model
    assert isinstance(model, MuseGlimmerConfig)
    return config.data.seq_length * flops_per_token(model, config.data.seq_length).training
