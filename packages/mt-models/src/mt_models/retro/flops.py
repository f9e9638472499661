"""Floating-point operations of RETRO for each token, from its configuration (counted as in mt_models.flops).

A chunk of m tokens has K neighbours of r tokens, so that a token of the text brings K r / m tokens to the encoder.
"""

from __future__ import annotations

from dataclasses import dataclass

from mt_models.flops import (
    Convention,
    Flops,
    core_flops,
    dense_feed_forward_flops,
    projection_flops,
)
from mt_models.flops import (
    flops_per_token as decoder_flops_per_token,
)
from mt_models.retro.config import RetroConfig


@dataclass(frozen=True)
class RetroFlops(Flops):
    """Forward FLOPs for each token of the text, over all layers."""

    attention_projections: float
    """Of the decoder's self-attention."""
    attention_core: float
    feed_forward: float
    output: float
    """Logits."""
    cross_attention_projections: float
    """Of the text's attention to neighbours; keys and values of neighbours included."""
    cross_attention_core: float
    encoder_attention_projections: float
    """Of the encoder of neighbours."""
    encoder_attention_core: float
    encoder_feed_forward: float
    encoder_cross_attention_projections: float
    """Of the neighbours' attention to the text; keys and values of the text included."""
    encoder_cross_attention_core: float


def flops_per_token(config: RetroConfig, seq_length: int, *, convention: Convention = "seen") -> RetroFlops:
    """The mean over the tokens of a sequence of whole chunks, all with neighbours.

    convention: also of the attention to neighbours, which the first m - 1 tokens have not. Raises ConfigError when the
    vocabulary is unknown.
    """
    chunk, retrieved = config.retro_chunk_length, config.retro_num_neighbors * config.retrieved_length
    ratio = retrieved / chunk
    decoder = decoder_flops_per_token(config, seq_length, convention=convention)
    pair = 4 * config.hidden_size * config.num_attention_heads * config.head_dim  # queries and output; keys and values
    # Positions m - 1 and later attend to neighbours: S - m + 1 of S.
    attending = 1.0 if convention == "full" else (seq_length - chunk + 1) / seq_length
    crossing, encoder = len(config.cross_attention_layers), config.retro_encoder_num_layers
    return RetroFlops(
        attention_projections=decoder.attention_projections,
        attention_core=decoder.attention_core,
        feed_forward=decoder.feed_forward,
        output=decoder.output,
        cross_attention_projections=crossing * pair * (1 + ratio),
        cross_attention_core=crossing * attending * core_flops(config, retrieved),
        encoder_attention_projections=encoder * ratio * projection_flops(config),
        encoder_attention_core=encoder * ratio * core_flops(config, config.retrieved_length),
        encoder_feed_forward=encoder * ratio * dense_feed_forward_flops(config),
        # Once: the first layer of the encoder alone attends to the text.
        encoder_cross_attention_projections=pair * (1 + ratio),
        encoder_cross_attention_core=ratio * core_flops(config, chunk),
    )
