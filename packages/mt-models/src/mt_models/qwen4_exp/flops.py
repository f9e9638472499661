"""FLOPs of Qwen4-Exp for each token (counted as in mt_models.flops)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mt_core.config.schema import Config
from mt_models.delta_net_flops import DeltaNetFlops, delta_net_flops
from mt_models.flops import Convention, core_flops, mean_keys, moe_flops, projection_flops
from mt_models.qwen4_exp.config import Qwen4ExpConfig


@dataclass(frozen=True)
class Qwen4ExpFlops(DeltaNetFlops):
    """Forward FLOPs for each token, over all layers."""

    connections: float
    """Gates and strengths of the streams."""
    ngrams: float
    """Projections and convolutions of the embeddings of n-grams."""
    indexer: float
    """Projections and scores of the indexers, which have no backward pass."""
    prediction: float
    """The layer of multi-token prediction and its logits, in training, without its indexer."""
    indexer_of_prediction: float
    """Its indexer."""

    @property
    def forward(self) -> float:
        """FLOPs of the model without multi-token prediction."""
        return super().forward - self.prediction - self.indexer_of_prediction

    @property
    def training(self) -> float:
        """Forward and backward, multi-token prediction included."""
        without_gradient = self.indexer + self.indexer_of_prediction
        return 3 * (self.forward - self.indexer + self.prediction) + without_gradient


def flops_per_token(config: Qwen4ExpConfig, seq_length: int, *, convention: Convention = "seen") -> Qwen4ExpFlops:
    """The mean over the tokens of a sequence. Raises ConfigError when the vocabulary is unknown."""
    gates = 2 * config.hidden_size * config.num_attention_heads * config.head_dim
    projections, feed_forward = projection_flops(config) + gates, moe_flops(config)
    decoder = delta_net_flops(config, seq_length, convention, projections=projections, feed_forward=feed_forward)
    attention = config.num_layers - sum(config.linear_layers)
    chooses = seq_length // config.qsa_compress_ratio > config.qsa_budget // config.qsa_compress_ratio
    keys = keys_seen(config, seq_length) if convention == "seen" else mean_keys(seq_length, None, convention)
    core = core_flops(config, keys)
    indexer = indexer_flops(config, seq_length, convention) if chooses else 0.0
    predicted = projections + core + feed_forward + decoder.output + prediction_flops(config)
    return Qwen4ExpFlops(
        **{**vars(decoder), "attention_core": attention * core},
        connections=connection_flops(config),
        ngrams=len(config.layers_with_ngrams) * ngram_flops(config),
        indexer=attention * indexer,
        prediction=config.mtp_num_layers * predicted,
        indexer_of_prediction=config.mtp_num_layers * indexer,
    )


def keys_seen(config: Qwen4ExpConfig, seq_length: int) -> float:
    """Keys that a query attends to, on average: those before it, or those of the chosen runs and of its own run."""
    ratio, most = config.qsa_compress_ratio, config.qsa_budget // config.qsa_compress_ratio
    positions = range(1, seq_length + 1)
    return sum(min(before // ratio, most) * ratio + before % ratio for before in positions) / seq_length


def indexer_flops(config: Qwen4ExpConfig, seq_length: int, convention: Convention) -> float:
    """Forward FLOPs of one indexer: its projection, and the products with the runs before a position."""
    rows = (config.qsa_indexer_n_heads + 1) * config.qsa_indexer_head_dim
    runs = mean_keys(seq_length, None, convention) / config.qsa_compress_ratio
    return 2.0 * (config.hidden_size * rows + runs * config.qsa_indexer_n_heads * config.qsa_indexer_head_dim)


def connection_flops(config: Qwen4ExpConfig, layers: int | None = None) -> float:
    """Two connections of each layer, and the mixer behind the last. layers: how many; default: those of the model."""
    width = config.residual_streams * config.hidden_size
    mixer, inject = 4.0 * width * config.residual_mix_rank, 2.0 * width * config.residual_streams
    return (config.num_layers if layers is None else layers) * 2 * (mixer + inject) + mixer


def prediction_flops(config: Qwen4ExpConfig) -> float:
    """What a layer of multi-token prediction has beside attention, experts and logits: the projections of the embedding
    and of each stream, its connections and its mixer."""
    return 2.0 * (1 + config.residual_streams) * config.hidden_size**2 + connection_flops(config, 1)


def ngram_flops(config: Qwen4ExpConfig) -> float:
    """One layer: keys for each stream and a value, and the convolution of the streams."""
    width, size = config.residual_streams * config.hidden_size, config.ngram_embedding_size
    return 2.0 * (size * (width + config.hidden_size) + width * config.ngram_conv_kernel)


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model: Any = config.model
    return config.data.seq_length * flops_per_token(model, config.data.seq_length).training
