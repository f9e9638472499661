"""Floating-point operations of LFM3 for each token, counted as in `mt_models.flops`."""

from __future__ import annotations

from dataclasses import dataclass

from mt_core.config.schema import Config
from mt_models.blocks.flop_convention import Convention
from mt_models.flops import (
    TokenFlops,
    core_flops,
    dense_feed_forward_flops,
    mean_keys,
    output_flops,
    projection_flops,
)
from mt_models.lfm3.config import Lfm3Config


@dataclass(frozen=True)
class Lfm3Flops(TokenFlops):
    """Forward FLOPs for each token, over all layers."""

    convolutions: float
    """The projections around the convolutions, and their taps."""


def flops_per_token(config: Lfm3Config, seq_length: int, *, convention: Convention = "seen") -> Lfm3Flops:
    """The mean over the tokens of a sequence. Raises ConfigError when the vocabulary is unknown."""
    layers = range(config.num_layers)
    attentions = [layer for layer in layers if not config.is_convolution(layer)]
    keys = sum(mean_keys(seq_length, config.window_of(layer), convention) for layer in attentions)
    gates = 2 * config.hidden_size * config.num_attention_heads if config.use_attention_gate else 0
    # in_proj to three times the width, out_proj, and k taps of each channel
    convolution = 8 * config.hidden_size**2 + 2 * config.conv_kernel * config.hidden_size
    return Lfm3Flops(
        attention_projections=len(attentions) * (projection_flops(config) + gates),
        attention_core=core_flops(config, keys),
        feed_forward=config.num_layers * dense_feed_forward_flops(config),
        output=output_flops(config.hidden_size, config.vocab_size),
        convolutions=(config.num_layers - len(attentions)) * convolution,
    )


def training_flops(config: Config) -> float:
    """FLOPs of training on a sample (`ModelSpec.training_flops`)."""
    model, length = config.model, config.data.seq_length
    assert isinstance(model, Lfm3Config)
    return length * flops_per_token(model, length).training
