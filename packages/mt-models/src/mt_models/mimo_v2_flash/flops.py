"""Floating-point operations of MiMo-V2-Flash for each token, counted as in `mt_models.flops`."""

from __future__ import annotations

from dataclasses import dataclass

from mt_core.config.schema import Config
from mt_models.blocks.flop_convention import Convention
from mt_models.flops import TokenFlops, dense_feed_forward_flops, mean_keys, moe_flops, output_flops
from mt_models.mimo_v2_flash.config import MiMoV2FlashConfig


@dataclass(frozen=True)
class MiMoV2FlashFlops(TokenFlops):
    """Forward FLOPs for each token, over all layers."""

    prediction: float
    """Layers of multi-token prediction, with their logits."""


def flops_per_token(config: MiMoV2FlashConfig, seq_length: int, *, convention: Convention = "seen") -> MiMoV2FlashFlops:
    """The mean over the tokens of a sequence. Raises ConfigError when the vocabulary is unknown."""
    layers = range(config.num_layers)
    of_layer = dense_feed_forward_flops(config) if config.moe is None else moe_flops(config)
    output = output_flops(config.hidden_size, config.vocab_size)
    return MiMoV2FlashFlops(
        attention_projections=sum(projection_flops(config, layer) for layer in layers),
        attention_core=sum(core_flops(config, layer, seq_length, convention) for layer in layers),
        feed_forward=config.num_layers * of_layer,
        output=output,
        prediction=config.mtp_num_layers * (predicted_layer_flops(config, seq_length, convention) + output),
    )


def projection_flops(config: MiMoV2FlashConfig, layer: int) -> float:
    """FLOPs of one layer's projections: queries and keys, values and the output."""
    heads, groups = config.num_attention_heads, config.of_layer(layer).query_groups
    return 2 * config.hidden_size * (heads + groups) * (config.head_dim + config.v_head_dim)


def core_flops(config: MiMoV2FlashConfig, layer: int, seq_length: int, convention: Convention) -> float:
    """FLOPs of one layer's scores and of their product with the values."""
    keys = mean_keys(seq_length, config.window_of(layer), convention)
    return 2 * config.num_attention_heads * (config.head_dim + config.v_head_dim) * keys


def predicted_layer_flops(config: MiMoV2FlashConfig, seq_length: int, convention: Convention) -> float:
    """FLOPs of a layer of multi-token prediction: the projection of state and embedding, and the layer."""
    layer = config.num_layers
    attention = projection_flops(config, layer) + core_flops(config, layer, seq_length, convention)
    return 4 * config.hidden_size**2 + attention + dense_feed_forward_flops(config)


def training_flops(config: Config) -> float:
    """FLOPs of training on a sample (`ModelSpec.training_flops`)."""
    model, length = config.model, config.data.seq_length
    assert isinstance(model, MiMoV2FlashConfig)
    return length * flops_per_token(model, length).training
