"""FLOPs of DeepSeek-V3.2 and GLM-5 for each token (counted as in mt_models.flops)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mt_core.config.schema import Config
from mt_models.deepseek.config import DeepseekFlops
from mt_models.deepseek.config import flops_per_token as dense_flops_per_token
from mt_models.deepseek_v32.config import IndexedAttentionConfig
from mt_models.flops import Convention, mean_keys


@dataclass(frozen=True)
class SparseFlops(DeepseekFlops):
    """Forward FLOPs for each token, over all layers."""

    indexer: float = 0.0
    """Projections and scores of the indexers, those of layers of multi-token prediction left out."""
    indexer_of_prediction: float = 0.0
    """The same of the layers of multi-token prediction, in training."""
    learns: bool = False
    """Whether the indexers are trained: their backward pass runs."""

    @property
    def forward(self) -> float:
        """FLOPs of the model without multi-token prediction."""
        parts = (self.attention_projections, self.attention_core, self.feed_forward, self.output, self.indexer)
        return sum(parts)

    @property
    def training(self) -> float:
        """Forward and backward, MTP included."""
        indexers = self.indexer + self.indexer_of_prediction
        return 3 * (self.forward - self.indexer + self.prediction) + (3 if self.learns else 1) * indexers


def flops_per_token(config: IndexedAttentionConfig, seq_length: int, *, convention: Convention = "seen") -> SparseFlops:
    """The mean over the tokens of a sequence of `seq_length`. Raises ConfigError when the vocabulary is unknown."""
    dense = dense_flops_per_token(config, seq_length, convention=convention)
    full = mean_keys(seq_length, None, convention)
    # Keys that are chosen and seen: no more than a window of so many has.
    window = None if config.dsa_dense_warmup else config.dsa_indexer_topk
    share = mean_keys(seq_length, window, convention) / full
    core_of_layer = dense.attention_core / config.num_layers
    indexer = indexer_flops(config, full) if seq_length > config.dsa_indexer_topk or _learns(config) else 0.0
    layers = sum(config.indexer_of(layer) == layer for layer in range(config.num_layers))
    return SparseFlops(
        attention_projections=dense.attention_projections,
        attention_core=share * dense.attention_core,
        feed_forward=dense.feed_forward,
        output=dense.output,
        prediction=dense.prediction - config.mtp_num_layers * (1 - share) * core_of_layer,
        indexer=layers * indexer,
        indexer_of_prediction=config.mtp_num_layers * indexer,
        learns=_learns(config),
    )


def _learns(config: IndexedAttentionConfig) -> bool:
    return config.dsa_indexer_loss_coeff > 0


def indexer_flops(config: IndexedAttentionConfig, keys: float) -> float:
    """Forward FLOPs of one indexer for each token: its projections, products with so many keys, and their sum."""
    heads, size, hidden = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim, config.hidden_size
    projections = (config.q_lora_rank or hidden) * heads * size + hidden * (size + heads)
    return 2.0 * (projections + keys * heads * (size + 1))


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model: Any = config.model
    return config.data.seq_length * flops_per_token(model, config.data.seq_length).training
