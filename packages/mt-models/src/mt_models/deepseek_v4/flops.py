"""FLOPs of DeepSeek-V4 for each token (counted as in mt_models.flops)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mt_core.config.schema import Config
from mt_models.deepseek.config import DeepseekFlops
from mt_models.deepseek_v4.config import DeepseekV4Config
from mt_models.flops import Convention, core_flops, mean_keys, moe_flops, output_flops


@dataclass(frozen=True)
class CompressedFlops(DeepseekFlops):
    """Forward FLOPs for each token, over all layers."""

    compression: float = 0.0
    """Projections to entries, those of indexers left out."""
    indexer: float = 0.0
    """Projections, entries and scores of the indexers."""
    connections: float = 0.0
    """Weights of streams, and their products with them."""
    learns: bool = False
    """Whether the indexers are trained: their backward pass runs."""

    @property
    def forward(self) -> float:
        """FLOPs of the model without multi-token prediction."""
        blocks = (self.attention_projections, self.attention_core, self.feed_forward, self.output)
        return sum(blocks) + self.compression + self.indexer + self.connections

    @property
    def training(self) -> float:
        """Forward and backward, MTP included."""
        return 3 * (self.forward - self.indexer + self.prediction) + (3 if self.learns else 1) * self.indexer


def flops_per_token(config: DeepseekV4Config, seq_length: int, *, convention: Convention = "seen") -> CompressedFlops:
    """The mean over the tokens of a sequence of `seq_length`. Raises ConfigError when the vocabulary is unknown."""
    layers = range(config.num_layers)
    projections, experts = projection_flops(config), moe_flops(config)
    output = output_flops(config.hidden_size, config.vocab_size) + connection_head_flops(config)
    window = core_flops(config, mean_keys(seq_length, config.sliding_window, convention))
    # A layer of multi-token prediction has a window alone, and a router that chooses by scores.
    each_depth = projections + window + experts + connection_flops(config) + 2 * _products(config) + output
    indexed = sum(config.is_indexed(layer) for layer in layers)
    return CompressedFlops(
        attention_projections=config.num_layers * projections,
        attention_core=sum(window + core_flops(config, entries_seen(config, n, seq_length)) for n in layers),
        feed_forward=config.num_layers * experts,
        output=output,
        prediction=config.mtp_num_layers * each_depth,
        compression=sum(_compressor_flops(config, config.head_dim, layer) for layer in layers),
        indexer=indexed * indexer_flops(config, seq_length) if _indexes(config, seq_length) else 0.0,
        connections=config.num_layers * connection_flops(config),
        learns=config.dsa_indexer_loss_coeff > 0,
    )


def projection_flops(config: DeepseekV4Config) -> float:
    """One layer's attention: queries through their latent, the key, the grouped and the output projection."""
    hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
    queries = hidden * config.q_lora_rank + config.q_lora_rank * width
    # Each channel of the heads meets the o_lora_rank rows of its group.
    output = width * config.o_lora_rank + config.o_groups * config.o_lora_rank * hidden
    return 2.0 * (queries + hidden * config.head_dim + output)


def entries_seen(config: DeepseekV4Config, layer: int, seq_length: int) -> float:
    """Entries that a query attends to, on average: those before it, or those that are chosen of them."""
    ratio = config.compression_of(layer)
    if not ratio:
        return 0.0
    every = mean_entries(seq_length, ratio)
    if config.is_indexed(layer) and not config.dsa_dense_warmup:
        return min(every, mean_entries(seq_length, ratio, config.dsa_indexer_topk))
    return every


def mean_entries(seq_length: int, ratio: int, most: int | None = None) -> float:
    """The mean over positions p of min((p + 1) // ratio, most)."""
    complete, rest = divmod(seq_length, ratio)
    reach = complete if most is None else min(most, complete)
    # Each of 1 to `complete` is seen from so many positions: `ratio` of them, the last from 1 + rest.
    grown = ratio * (reach * (reach - 1) / 2) + reach * (ratio * (complete - reach) + 1 + rest)
    return max(grown, 0.0) / seq_length if complete else 0.0


def _compressor_flops(config: DeepseekV4Config, size: int, layer: int) -> float:
    """Projections to values and gates; overlapping entries have twice as many channels."""
    if not config.compression_of(layer):
        return 0.0
    return 2.0 * 2 * config.hidden_size * size * (2 if config.is_indexed(layer) else 1)


def _indexes(config: DeepseekV4Config, seq_length: int) -> bool:
    entries = seq_length // config.indexed_compress_ratio
    return entries > config.dsa_indexer_topk or config.dsa_indexer_loss_coeff > 0


def indexer_flops(config: DeepseekV4Config, seq_length: int) -> float:
    """Forward FLOPs of one indexer for each token."""
    heads, size, hidden = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim, config.hidden_size
    # Entries of two overlapping runs, each with values and gates.
    projections = config.q_lora_rank * heads * size + hidden * heads + 4 * hidden * size
    return 2.0 * (projections + mean_entries(seq_length, config.indexed_compress_ratio) * heads * (size + 1))


def connection_flops(config: DeepseekV4Config) -> float:
    """One layer: the connections of attention and of the experts with the streams."""
    n, hidden = config.hyper_connection_streams, config.hidden_size
    # Weights from all streams; streams into the block, its output out of it, and streams into streams.
    return 2 * 2.0 * ((2 + n) * n * n * hidden + (2 + n) * n * hidden)


def connection_head_flops(config: DeepseekV4Config) -> float:
    n, hidden = config.hyper_connection_streams, config.hidden_size
    return 2.0 * (n * n * hidden + n * hidden)


def _products(config: DeepseekV4Config) -> float:
    """Multiply-adds of e_proj, and of h_proj for each stream."""
    return config.hidden_size**2 * (1 + config.hyper_connection_streams)


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model: Any = config.model
    return config.data.seq_length * flops_per_token(model, config.data.seq_length).training
