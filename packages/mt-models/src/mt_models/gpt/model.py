"""The GPT model: embedding, a stack of transformer layers, logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.embedding import VocabParallelEmbedding, VocabParallelOutput, project_to_vocab
from mt_core.nn.environment import ModelEnvironment
from mt_core.nn.layout import Init, LayoutModule, ParameterLayout, normal
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.alibi import alibi_slopes
from mt_models.blocks.cache import KeyValueCache
from mt_models.blocks.rotary import RotaryAngles, inverse_frequencies
from mt_models.blocks.transformer import TransformerLayer, TransformerStack
from mt_models.gpt.config import GPTConfig


class GPTEmbedding(LayoutModule):
    """Word vectors, plus learned positions if the model has them, then dropout."""

    def __init__(self, config: GPTConfig, vocab_size: int, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.dropout = config.hidden_dropout
        init = normal(config.init_method_std)
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size, config.hidden_size, ctx, init=init, divisible_by=config.make_vocab_size_divisible_by
        )
        self.position_embeddings: PositionTable | None = None
        if config.max_position_embeddings is not None:
            self.position_embeddings = PositionTable(config.max_position_embeddings, config.hidden_size, init, ctx)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """[B, S] ids and positions -> [B, S, H]"""
        x = self.word_embeddings(tokens)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(position_ids)
        return F.dropout(x, self.dropout, self.training)


class PositionTable(LayoutModule):
    """A learned vector for each position: [max_position_embeddings, hidden]."""

    weight: Tensor

    def __init__(self, positions: int, hidden_size: int, init: Init, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.declare("weight", ParameterLayout((positions, hidden_size), init))

    def forward(self, position_ids: Tensor) -> Tensor:
        return F.embedding(position_ids, self.weight)


class GPTModel(nn.Module):
    """tokens [B, S] -> logits [B, S, vocab] over the true vocabulary."""

    def __init__(self, config: GPTConfig, environment: ModelEnvironment) -> None:
        super().__init__()
        ctx = environment.parallel
        assert config.vocab_size is not None  # the trainer fills it in from the tokenizer
        self.config = config
        self.vocab_size = config.vocab_size
        self.embedding = GPTEmbedding(config, config.vocab_size, ctx)
        core = environment.attention(
            config.attention_backend,
            num_heads=config.num_attention_heads,
            num_query_groups=config.query_groups,
            head_dim=config.head_dim,
            dropout=config.attention_dropout,
            bias=config.position_embedding_type == "alibi",
        )
        layers = [
            TransformerLayer(config, core, environment.feed_forward(config.feed_forward, config), ctx)
            for _ in range(config.num_layers)
        ]
        self.decoder = TransformerStack(layers, config, ctx, _recomputed_layers(config, environment))
        self.output_layer: VocabParallelOutput | None = None
        if config.untie_embeddings_and_output_weights:
            self.output_layer = VocabParallelOutput(
                config.vocab_size,
                config.hidden_size,
                ctx,
                init=normal(config.init_method_std),
                divisible_by=config.make_vocab_size_divisible_by,
            )

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """position_ids [B, S]: default 0 ..., after the cached ones. segment_ids [B, S]: see AttentionPattern."""
        if position_ids is None:
            start = cache.length if cache else 0
            position_ids = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
        x = self.embedding(tokens, position_ids)
        x = self.decoder(x, self._pattern(segment_ids, x), self._angles(position_ids), cache)
        if self.output_layer is not None:
            return self.output_layer(x)
        words = self.embedding.word_embeddings
        return project_to_vocab(x, words.weight, words.range, words.ctx)

    def new_cache(self, capacity: int) -> KeyValueCache:
        """An empty cache for decoding up to `capacity` positions."""
        return KeyValueCache(self.config.num_layers, capacity)

    @property
    def max_sequence_length(self) -> int | None:
        """Longest sequence it can take; None when positions are not a table."""
        return self.config.max_position_embeddings

    def _pattern(self, segment_ids: Tensor | None, x: Tensor) -> AttentionPattern:
        slopes = None
        if self.config.position_embedding_type == "alibi":
            slopes = alibi_slopes(self.config.num_attention_heads).to(x.device)
        return AttentionPattern(segment_ids=segment_ids, alibi_slopes=slopes)

    def _angles(self, position_ids: Tensor) -> RotaryAngles | None:
        if self.config.position_embedding_type != "rope":
            return None
        return RotaryAngles(position_ids, inverse_frequencies(self.config.rotary_dim, self.config.rotary_base))


def _recomputed_layers(config: GPTConfig, environment: ModelEnvironment) -> int:
    recompute = environment.config.recompute
    if recompute.recompute_granularity == "none":
        return 0
    return min(recompute.recompute_num_layers or config.num_layers, config.num_layers)


def build_gpt(config: GPTConfig, environment: ModelEnvironment) -> GPTModel:
    return GPTModel(config, environment)
