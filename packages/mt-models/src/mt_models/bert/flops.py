"""Floating-point operations of BERT and the biencoder, from their configuration (counted as in mt_models.flops).

Every position attends to all others, so that there is one convention. Operations per sequence are averaged over its
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from mt_models.bert.config import BertConfig
from mt_models.flops import Flops, core_flops, dense_feed_forward_flops, output_flops, projection_flops


@dataclass(frozen=True)
class EncoderFlops(Flops):
    """Forward FLOPs for each token, over all layers."""

    attention_projections: float
    """Queries, keys, values and the output of attention."""
    attention_core: float
    """Scores and their product with the values."""
    feed_forward: float


@dataclass(frozen=True)
class BertFlops(EncoderFlops):
    """Forward FLOPs for each token, over all layers, and of the heads."""

    lm_head: float
    """The layer before the MLM logits."""
    output: float
    """MLM logits."""
    pooler: float
    binary_head: float


def flops_per_token(config: BertConfig, seq_length: int) -> BertFlops:
    """The mean over the tokens of a sequence. Raises ConfigError when the vocabulary is unknown."""
    hidden, layers = config.hidden_size, encoder_flops(config, seq_length)
    return BertFlops(
        attention_projections=layers.attention_projections,
        attention_core=layers.attention_core,
        feed_forward=layers.feed_forward,
        lm_head=2 * hidden**2 if config.add_lm_head else 0.0,
        output=output_flops(hidden, config.vocab_size) if config.add_lm_head else 0.0,
        # One position of the sequence, averaged over its tokens
        pooler=2 * hidden**2 / seq_length if config.has_pooler else 0.0,
        binary_head=4 * hidden / seq_length if config.bert_binary_head else 0.0,
    )


def encoder_flops(config: BertConfig, seq_length: int) -> EncoderFlops:
    """Of the layers."""
    return EncoderFlops(
        attention_projections=config.num_layers * projection_flops(config),
        attention_core=config.num_layers * core_flops(config, seq_length),
        feed_forward=config.num_layers * dense_feed_forward_flops(config),
    )
