"""Floating-point operations of T5 for each sample, from its configuration (counted as in mt_models.flops)."""

from __future__ import annotations

from dataclasses import dataclass

from mt_models.flops import (
    Convention,
    Flops,
    core_flops,
    dense_feed_forward_flops,
    mean_keys,
    output_flops,
    projection_flops,
)
from mt_models.t5.config import T5Config


@dataclass(frozen=True)
class SampleFlops(Flops):
    """Forward FLOPs for each sample, over all positions and layers."""

    encoder_attention_projections: float
    encoder_attention_core: float
    encoder_feed_forward: float
    decoder_attention_projections: float
    decoder_attention_core: float
    cross_attention_projections: float
    """Queries and output at the decoder's positions, keys and values at the encoder's."""
    cross_attention_core: float
    decoder_feed_forward: float
    output: float
    """Logits."""


def flops_per_sample(
    config: T5Config, seq_length: int, decoder_seq_length: int, *, convention: Convention = "seen"
) -> SampleFlops:
    """seq_length, decoder_seq_length: positions of encoder and decoder, padding included. convention: of the decoder's
    self-attention. Raises ConfigError when the vocabulary is unknown."""
    encoder, decoder = config.num_layers, config.decoder_layers
    # Two matrices [H, N D] for each position: queries and output in the decoder, keys and values in the encoder.
    width = 4 * config.hidden_size * config.num_attention_heads * config.head_dim
    own_keys = mean_keys(decoder_seq_length, None, convention)
    return SampleFlops(
        encoder_attention_projections=encoder * seq_length * projection_flops(config),
        encoder_attention_core=encoder * seq_length * core_flops(config, seq_length),
        encoder_feed_forward=encoder * seq_length * dense_feed_forward_flops(config),
        decoder_attention_projections=decoder * decoder_seq_length * projection_flops(config),
        decoder_attention_core=decoder * decoder_seq_length * core_flops(config, own_keys),
        cross_attention_projections=decoder * width * (decoder_seq_length + seq_length),
        cross_attention_core=decoder * decoder_seq_length * core_flops(config, seq_length),
        decoder_feed_forward=decoder * decoder_seq_length * dense_feed_forward_flops(config),
        output=decoder_seq_length * output_flops(config.hidden_size, config.vocab_size),
    )
