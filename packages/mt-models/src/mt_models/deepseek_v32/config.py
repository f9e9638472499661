"""Configuration of DeepSeek-V3.2 and GLM-5: that of DeepSeek-V3, and the keys of the indexer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Protocol

from pydantic import Field

from mt_core.config.fields import NonNegativeInt, PositiveInt
from mt_core.config.layer_pattern import read_pattern
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_models.deepseek.config import DeepseekConfig, check_deepseek, shrink_deepseek

INDEXER_PATTERN = "model.dsa_indexer_pattern"


class IndexedAttentionConfig(DeepseekConfig):
    """Latent attention over the keys that an indexer chooses."""

    dsa_indexer_n_heads: PositiveInt = 64
    """Query heads of the indexer; they share one key."""
    dsa_indexer_head_dim: PositiveInt = 128
    """Channels of a query and key head of the indexer, of which the first qk_pos_emb_head_dim are rotated."""
    dsa_indexer_topk: PositiveInt = 2048
    """Keys that a query attends to: those with the highest scores of the indexer."""
    dsa_indexer_k_norm_epsilon: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the variance in the LayerNorm of the indexer's keys."""
    dsa_indexer_topk_freq: PositiveInt = 1
    """Every so many layers one has an indexer; those behind it attend to the keys that it has chosen."""
    dsa_indexer_skip_topk_offset: NonNegativeInt = 0
    """So many first layers all have an indexer; from there on dsa_indexer_topk_freq counts."""
    dsa_indexer_pattern: str | None = None
    """In place of these two, a pattern with a 1 for each layer that has an indexer, such as "([1]*2+[0]*1+[1]*1)"; the
    first is a 1."""
    dsa_indexer_loss_coeff: Annotated[float, Field(ge=0)] = 0.0
    """What the loss of an indexer counts beside that of the next token: the KL divergence of its scores from the
    attention of its layer. 0: the indexers are not trained."""
    dsa_indexer_use_sparse_loss: bool = False
    """The loss is about the chosen keys alone; otherwise about all that a query sees."""
    dsa_dense_warmup: bool = False
    """Attention is over all keys, while the indexer learns: the first stage of training one from a model without.
    train.frozen_parameters keeps all else as it is."""

    def indexer_of(self, layer: int) -> int:
        """The layer, counted from 0, whose indexer chooses the keys of a layer: itself, or one before it."""
        offset, number = max(self.dsa_indexer_skip_topk_offset, 1), layer + 1
        # A layer of multi-token prediction has an indexer, whatever its number.
        predicts = layer >= self.num_layers - self._predicted_layers
        if predicts:
            return layer
        if self.dsa_indexer_pattern is not None:
            return self._last_with_indexer(self.dsa_indexer_pattern, layer)
        if number <= offset:
            return layer
        return layer - (number - offset) % self.dsa_indexer_topk_freq

    def _last_with_indexer(self, pattern: str, layer: int) -> int:
        entries = read_pattern(pattern, self.num_layers - self._predicted_layers, INDEXER_PATTERN)
        if not entries[0]:
            raise ConfigError(f"{INDEXER_PATTERN}={pattern!r} begins with 0: the first layer needs an indexer")
        return max(number for number in range(layer + 1) if entries[number])


class DeepseekV32Config(IndexedAttentionConfig):
    """DeepSeek-V3.2 (DeepSeek, 2025), GLM-5, 5.1 and 5.2 (Z.ai, 2026)."""

    q_lora_rank: PositiveInt = 1536
    """Channels of the latent of the queries, from which the queries of the indexer come, too."""
    dsa_indexer_rope_interleaved: bool = False
    """The indexer rotates adjacent channels together (GLM-5), as attention does; otherwise channels of the two halves
    (DeepSeek-V3.2)."""


def check_deepseek_v32(config: Config) -> None:
    check_deepseek(config)
    model = config.model
    assert isinstance(model, DeepseekV32Config)
    check_indexers(config, model)


def check_indexers(config: Config, model: IndexedAttentionConfig) -> None:
    """Raise ConfigError for indexers and layouts that do not fit together."""
    if model.qk_pos_emb_head_dim > model.dsa_indexer_head_dim:
        raise ConfigError(
            f"model.dsa_indexer_head_dim={model.dsa_indexer_head_dim} is below the channels that positions rotate "
            f"(model.qk_pos_emb_head_dim)={model.qk_pos_emb_head_dim}"
        )
    model.indexer_of(0)  # raises for a pattern that is none
    _check_loss(model)
    check_indexer_layout(config, model)


def _check_loss(model: IndexedAttentionConfig) -> None:
    if model.dsa_indexer_loss_coeff:
        return
    for key in ("dsa_indexer_use_sparse_loss", "dsa_dense_warmup"):
        if getattr(model, key):
            raise ConfigError(f"model.{key}=true would be ignored: set model.dsa_indexer_loss_coeff too")


class ChoosesKeys(Protocol):
    """A configuration of attention over the keys that an indexer chooses."""

    @property
    def family(self) -> str: ...
    @property
    def attention_backend(self) -> str: ...
    @property
    def dsa_indexer_topk(self) -> int: ...


def check_indexer_layout(config: Config, model: ChoosesKeys) -> None:
    """Raises ConfigError for what cannot be combined with a choice of keys."""
    if config.parallel.context_parallel_size > 1:
        raise ConfigError(
            f"parallel.context_parallel_size={config.parallel.context_parallel_size} cannot be combined with "
            f"model.family={model.family}: the indexer chooses among the keys of the whole sequence, which other ranks "
            "hold; set it to 1, and share a sequence by parallel.tensor_model_parallel_size and "
            "parallel.sequence_parallel"
        )
    if model.attention_backend == "flex" and config.data.seq_length > model.dsa_indexer_topk:
        raise ConfigError(
            f"model.attention_backend=flex cannot serve data.seq_length={config.data.seq_length} above "
            f"model.dsa_indexer_topk={model.dsa_indexer_topk}: the choice of keys is one for all heads, which it does "
            "not take; use sdpa or auto"
        )
    if config.numerics.batch_invariant:
        raise ConfigError(
            f"numerics.batch_invariant cannot be combined with model.family={model.family}: its kernels of attention "
            "leave no keys out; set it to false"
        )


# -- a small model for checks ------------------------------------------------------------------------


def shrink_indexers(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """Half of the keys are left out at the end of a sequence."""
    return {
        **shrink_deepseek(model, seq_length),
        "dsa_indexer_n_heads": 3,
        "dsa_indexer_head_dim": 8,
        "dsa_indexer_topk": max(min(model["dsa_indexer_topk"], seq_length // 2), 1),
    }
