"""Floating-point operations of Step-3.5 and Step-3.7 for each token, counted as in `mt_models.flops`."""

from __future__ import annotations

from mt_core.config.schema import Config
from mt_models.blocks.flop_convention import Convention
from mt_models.flops import (
    TokenFlops,
    core_flops,
    dense_feed_forward_flops,
    mean_keys,
    moe_flops,
    output_flops,
    projection_flops,
)
from mt_models.step3p7.config import Step3p7Config


def flops_per_token(config: Step3p7Config, seq_length: int, *, convention: Convention = "seen") -> TokenFlops:
    """The mean over the tokens of a sequence. Raises ConfigError when the vocabulary is unknown."""
    layers = [config.of_layer(layer) for layer in range(config.num_layers)]
    keys = [mean_keys(seq_length, config.window_of(layer), convention) for layer in range(config.num_layers)]
    feed_forward = dense_feed_forward_flops(config) if config.moe is None else moe_flops(config)
    gates = sum(2 * config.hidden_size * layer.num_attention_heads for layer in layers)
    return TokenFlops(
        attention_projections=sum(projection_flops(layer) for layer in layers) + gates,
        attention_core=sum(core_flops(layer, seen) for layer, seen in zip(layers, keys, strict=True)),
        feed_forward=config.num_layers * feed_forward,
        output=output_flops(config.hidden_size, config.vocab_size),
    )


def training_flops(config: Config) -> float:
    """FLOPs of training on a sample (`ModelSpec.training_flops`)."""
    model, length = config.model, config.data.seq_length
    assert isinstance(model, Step3p7Config)
    return length * flops_per_token(model, length).training
