"""FLOPs of GLM-5.3-Flash for each token (counted as in mt_models.flops)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from mt_core.config.schema import Config
from mt_models.delta_net_flops import DeltaNetFlops
from mt_models.flops import Convention, mean_keys
from mt_models.glm5_next.config import Glm5NextConfig
from mt_models.kimi_linear.flops import flops_per_token as dense_flops_per_token
from mt_models.kimi_linear.flops import prediction_flops


@dataclass(frozen=True)
class PooledFlops(DeltaNetFlops):
    """Forward FLOPs for each token, over all layers."""

    indexer: float = 0.0
    """Projections and scores of the indexers, which are not trained."""
    connections: float = 0.0
    """Weights of streams, and their products with them."""

    @property
    def training(self) -> float:
        return 3 * (self.forward - self.indexer) + self.indexer


def flops_per_token(config: Glm5NextConfig, seq_length: int, *, convention: Convention = "seen") -> PooledFlops:
    """The mean over the tokens of a sequence. Raises ConfigError when the vocabulary is unknown."""
    dense = dense_flops_per_token(config, seq_length, convention=convention)
    # Positions that are chosen and seen: no more than a window of so many has, and half a pool.
    chosen = config.dsa_indexer_topk + (config.dsa_indexer_pool_size - 1) // 2
    share = mean_keys(seq_length, chosen, convention) / mean_keys(seq_length, None, convention)
    parts = {part.name: getattr(dense, part.name) for part in fields(dense)}
    chooses = seq_length > config.dsa_indexer_topk
    return PooledFlops(
        **{**parts, "attention_core": share * dense.attention_core},
        indexer=config.linear_layers.count(False) * indexer_flops(config, seq_length, convention) if chooses else 0.0,
        connections=config.num_layers * connection_flops(config),
    )


def indexer_flops(config: Glm5NextConfig, seq_length: int, convention: Convention) -> float:
    """Forward FLOPs of one indexer for each token: its projections, products with the pools, and their sum."""
    heads, size, hidden = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim, config.hidden_size
    pools = mean_keys(seq_length, None, convention) / config.dsa_indexer_pool_size
    projections = config.q_lora_rank * heads * size + hidden * (2 * size + heads)
    return 2.0 * (projections + pools * heads * (size + 1))


def connection_flops(config: Glm5NextConfig) -> float:
    """One layer: the connections of attention and of the feed-forward with the streams."""
    n, hidden = config.hyper_connection_streams, config.hidden_size
    return 2 * 2.0 * ((2 + n) * n * n * hidden + (2 + n) * n * hidden)


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model: Any = config.model
    length = config.data.seq_length

    def training(counted: Glm5NextConfig) -> float:
        return flops_per_token(counted, length).training

    # Layers of multi-token prediction have one residual stream.
    connections = 3 * model.mtp_num_layers * connection_flops(model)
    return length * (training(model) + prediction_flops(model, training) - connections)
