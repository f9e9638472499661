"""Floating-point operations of AFMoE for each token, counted as in `mt_models.flops`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mt_core.config.schema import Config
from mt_models.afmoe.config import AfmoeConfig
from mt_models.blocks.flop_convention import Convention
from mt_models.flops import TokenFlops, moe_flops
from mt_models.flops import flops_per_token as plain_flops


def flops_per_token(config: AfmoeConfig, seq_length: int, *, convention: Convention = "seen") -> TokenFlops:
    """The mean over the tokens of a sequence. Raises ConfigError when the vocabulary is unknown."""
    plain = plain_flops(config, seq_length, convention=convention, feed_forward=moe_flops(config))
    # The gates have as many rows as the queries.
    gates = 2 * config.hidden_size * config.num_attention_heads * config.head_dim
    return replace(plain, attention_projections=plain.attention_projections + config.num_layers * gates)


def training_flops(config: Config) -> float:
    """FLOPs of training on a sample (`ModelSpec.training_flops`)."""
    model: Any = config.model
    return config.data.seq_length * flops_per_token(model, config.data.seq_length).training
