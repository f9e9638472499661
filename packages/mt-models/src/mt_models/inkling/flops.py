"""Floating-point operations of Inkling for each token, counted as in `mt_models.flops`."""

from __future__ import annotations

from dataclasses import dataclass

from mt_core.config.schema import Config
from mt_models.blocks.flop_convention import Convention
from mt_models.blocks.moe import MoEOptions
from mt_models.flops import TokenFlops, core_flops, mean_keys, moe_flops, output_flops, projection_flops
from mt_models.inkling.config import InklingConfig


@dataclass(frozen=True)
class InklingFlops(TokenFlops):
    """Forward FLOPs for each token, over all layers. attention_core: with the biases by distance."""

    convolutions: float
    """The taps of keys, values and outputs of blocks."""


def flops_per_token(config: InklingConfig, seq_length: int, *, convention: Convention = "seen") -> InklingFlops:
    """The mean over the tokens of a sequence. Raises ConfigError when the vocabulary is unknown."""
    layers = range(config.num_layers)
    # A row of the router for each shared expert too.
    of_shared = 2 * config.hidden_size * config.scored_shared_experts
    return InklingFlops(
        attention_projections=sum(_projections(config, layer) for layer in layers),
        attention_core=sum(_core(config, layer, seq_length, convention) for layer in layers),
        feed_forward=config.num_layers * moe_flops(config) + sum(MoEOptions(config).layers) * of_shared,
        output=output_flops(config.hidden_size, config.vocab_size),
        convolutions=sum(_taps(config, layer) for layer in layers),
    )


def _projections(config: InklingConfig, layer: int) -> float:
    sized = config.of_layer(layer)
    return projection_flops(sized) + 2 * config.hidden_size * sized.num_attention_heads * config.relative_rank


def _taps(config: InklingConfig, layer: int) -> float:
    sized = config.of_layer(layer)
    return 2 * config.conv_kernel * (2 * config.hidden_size + 2 * sized.query_groups * sized.head_dim)


def _core(config: InklingConfig, layer: int, seq_length: int, convention: Convention) -> float:
    sized = config.of_layer(layer)
    keys = mean_keys(seq_length, config.window_of(layer), convention)
    biases = 2 * sized.num_attention_heads * config.relative_rank * config.extent_of(layer)
    return core_flops(sized, keys) + biases


def training_flops(config: Config) -> float:
    """FLOPs of training on a sample (`ModelSpec.training_flops`)."""
    model, length = config.model, config.data.seq_length
    assert isinstance(model, InklingConfig)
    return length * flops_per_token(model, length).training
