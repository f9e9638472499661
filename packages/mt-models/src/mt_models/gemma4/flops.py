"""Floating-point operations of Gemma 4 for each token, counted as in `mt_models.flops`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mt_core.config.schema import Config
from mt_models.blocks.flop_convention import Convention
from mt_models.flops import (
    TokenFlops,
    core_flops,
    dense_feed_forward_flops,
    mean_keys,
    moe_flops,
    output_flops,
)
from mt_models.gemma4.config import Gemma4Config


@dataclass(frozen=True)
class Gemma4Flops(TokenFlops):
    """Forward FLOPs for each token, over all layers."""

    experts: float
    """Router and experts beside the dense feed-forward."""
    per_layer_inputs: float
    """The projection of token embeddings for all layers, and the two matrices in each layer."""


def flops_per_token(config: Gemma4Config, seq_length: int, *, convention: Convention = "seen") -> Gemma4Flops:
    """The mean over the tokens of a sequence. Raises ConfigError when the vocabulary is unknown."""
    layers = range(config.num_layers)
    keys = {layer: mean_keys(seq_length, config.window_of(layer), convention) for layer in layers}
    channels = config.num_layers * config.hidden_size_per_layer_input
    return Gemma4Flops(
        attention_projections=sum(projection_flops(config, layer) for layer in layers),
        attention_core=sum(core_flops(config.of_layer(layer), keys[layer]) for layer in layers),
        feed_forward=sum(dense_feed_forward_flops(config.of_layer(layer)) for layer in layers),
        output=output_flops(config.hidden_size, config.vocab_size),
        experts=config.num_layers * moe_flops(config) if config.moe is not None else 0.0,
        # H x P three times: into the layers' inputs, and in and out of each layer's branch.
        per_layer_inputs=2 * 3 * config.hidden_size * channels,
    )


def projection_flops(config: Gemma4Config, layer: int) -> float:
    """FLOPs of one layer's projections: queries, the output, and the keys and values that it computes."""
    sized = config.of_layer(layer)
    computed = 0 if config.shares_kv(layer) else 1 if config.keys_are_values(layer) else 2
    heads = 2 * config.num_attention_heads + computed * sized.query_groups
    return 2 * config.hidden_size * sized.head_dim * heads


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model: Any = config.model
    return config.data.seq_length * flops_per_token(model, config.data.seq_length).training
