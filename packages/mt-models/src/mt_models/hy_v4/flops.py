"""FLOPs of Hy4 for each token (counted as in mt_models.flops)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from mt_core.config.schema import Config
from mt_models.deepseek_v32.flops import SparseFlops
from mt_models.deepseek_v32.flops import flops_per_token as indexed_flops_per_token
from mt_models.flops import Convention
from mt_models.hy_v4.config import HyV4Config


@dataclass(frozen=True)
class HyV4Flops(SparseFlops):
    """Forward FLOPs for each token, over all layers."""

    connections: float = 0.0
    """Weights of streams, and their products with them."""

    @property
    def forward(self) -> float:
        return super().forward + self.connections


def flops_per_token(config: HyV4Config, seq_length: int, *, convention: Convention = "seen") -> HyV4Flops:
    """The mean over the tokens of a sequence of `seq_length`. Raises ConfigError when the vocabulary is unknown."""
    indexed = indexed_flops_per_token(config, seq_length, convention=convention)
    parts = {part.name: getattr(indexed, part.name) for part in fields(indexed)}
    gates = 2.0 * config.hidden_size * config.num_attention_heads * config.v_head_dim
    parts["attention_projections"] += config.num_layers * gates
    return HyV4Flops(**parts, connections=connection_flops(config))


def connection_flops(config: HyV4Config) -> float:
    """The connections of all blocks with the streams, and the head behind the last layer."""
    n, hidden = config.hyper_connection_streams, config.hidden_size
    # Weights: so many rows of n H numbers. Sums of the streams; what is added to them is no product of matrices.
    of_block, of_head = 2 * n * n * hidden + n * hidden, n * n * hidden + n * hidden
    return 2.0 * (2 * config.num_layers * of_block + of_head)


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model: Any = config.model
    return config.data.seq_length * flops_per_token(model, config.data.seq_length).training
