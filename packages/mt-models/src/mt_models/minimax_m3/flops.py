"""FLOPs of MiniMax-M3 for each token (counted as in mt_models.flops)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mt_core.config.schema import Config
from mt_models.flops import (
    Convention,
    TokenFlops,
    core_flops,
    mean_keys,
    moe_flops,
    output_flops,
    projection_flops,
)
from mt_models.minimax_m3.config import MiniMaxM3Config


@dataclass(frozen=True)
class BlockSparseFlops(TokenFlops):
    """Forward FLOPs for each token, over all layers."""

    indexer: float
    """Projections and scores of the indexers, which have no backward pass."""

    @property
    def training(self) -> float:
        """Forward and backward."""
        return 3 * (self.forward - self.indexer) + self.indexer


def flops_per_token(config: MiniMaxM3Config, seq_length: int, *, convention: Convention = "seen") -> BlockSparseFlops:
    """The mean over the tokens of a sequence of `seq_length`. Raises ConfigError when the vocabulary is unknown."""
    full, sparse = mean_keys(seq_length, None, convention), sum(config.sparse_layers)
    chosen = mean_chosen_keys(config, seq_length) if convention == "seen" else full
    chooses = config.leaves_blocks_out(seq_length)
    return BlockSparseFlops(
        attention_projections=config.num_layers * projection_flops(config),
        attention_core=core_flops(config, (config.num_layers - sparse) * full + sparse * chosen),
        feed_forward=config.num_layers * moe_flops(config),
        output=output_flops(config.hidden_size, config.vocab_size),
        indexer=sparse * indexer_flops(config, full) if chooses else 0.0,
    )


def mean_chosen_keys(config: MiniMaxM3Config, seq_length: int) -> float:
    """Keys that a query attends to in a layer with chosen blocks: whole blocks, and its own up to its position."""
    size, topk = config.sparse_block_size, config.sparse_topk_blocks
    blocks, rest = divmod(seq_length, size)
    # Queries of block number n (from 0) attend to min(n, topk - 1) whole blocks, and to 1, 2, ... keys of their own.
    whole = sum(min(number, topk - 1) for number in range(blocks)) * size + min(blocks, topk - 1) * rest
    partial = blocks * size * (size + 1) / 2 + rest * (rest + 1) / 2
    return (whole * size + partial) / seq_length


def indexer_flops(config: MiniMaxM3Config, keys: float) -> float:
    """Forward FLOPs of one indexer for each token: its projections, and products with so many keys."""
    heads, size = config.index_heads, config.sparse_index_dim
    return 2.0 * size * (config.hidden_size * (heads + 1) + keys * heads)


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model: Any = config.model
    return config.data.seq_length * flops_per_token(model, config.data.seq_length).training
