"""A causal language model around a stack of layers: tokens -> embedding -> layers -> logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.embedding import VocabParallelEmbedding, VocabParallelOutput, project_to_vocab
from mt_core.nn.environment import ModelEnvironment
from mt_core.nn.layout import LayoutModule, normal
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.cache import KeyValueCache
from mt_models.blocks.rotary import RotaryAngles
from mt_models.blocks.transformer import LayerShape, TransformerStack


class DecoderShape(LayerShape, Protocol):
    """What a decoder reads from its configuration, beside what its layers read."""

    @property
    def vocab_size(self) -> int | None: ...
    @property
    def make_vocab_size_divisible_by(self) -> int: ...
    @property
    def untie_embeddings_and_output_weights(self) -> bool: ...


class TokenEmbedding(LayoutModule):
    """A vector for each token."""

    def __init__(self, config: DecoderShape, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        assert config.vocab_size is not None  # the trainer fills it in from the tokenizer
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            ctx,
            init=normal(config.init_method_std),
            divisible_by=config.make_vocab_size_divisible_by,
        )

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """[B, S] ids and positions -> [B, S, H]"""
        return self.word_embeddings(tokens)


class CausalDecoder(nn.Module):
    """tokens [B, S] -> logits [B, S, vocab]: over the true vocabulary, divided over tensor-parallel ranks.

    A family gives its embedding and layers, and says in `pattern` and `angles` what attention is given.
    """

    def __init__(
        self,
        config: DecoderShape,
        environment: ModelEnvironment,
        embedding: TokenEmbedding,
        layers: Sequence[nn.Module],
        final_layernorm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        ctx = environment.parallel
        assert config.vocab_size is not None
        self.config = config
        self.vocab_size = config.vocab_size
        self.embedding = embedding
        recomputed = recomputed_layers(config.num_layers, environment)
        self.decoder = TransformerStack(layers, config, ctx, recomputed, final_layernorm)
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
        pattern = self.pattern(segment_ids, tokens.device)
        x = self.decoder(x, pattern, self.angles(position_ids, cache.capacity if cache else None), cache)
        return self.logits(x)

    def pattern(self, segment_ids: Tensor | None, device: torch.device) -> AttentionPattern:
        """Which keys a query sees."""
        return AttentionPattern(segment_ids=segment_ids)

    def angles(self, position_ids: Tensor, capacity: int | None) -> RotaryAngles | None:
        """Rotary angles of positions [B or 1, S]. capacity: the length that a cached sequence may grow to."""
        return None

    def logits(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, vocab]"""
        if self.output_layer is not None:
            return self.output_layer(x)
        words = self.embedding.word_embeddings
        return project_to_vocab(x, words.weight, words.range, words.ctx)

    def new_cache(self, capacity: int) -> KeyValueCache:
        """An empty cache for decoding up to `capacity` positions."""
        return KeyValueCache(self.config.num_layers, capacity)

    @property
    def max_sequence_length(self) -> int | None:
        """Longest sequence it can take; None when there is no limit."""
        return None


def recomputed_layers(num_layers: int, environment: ModelEnvironment) -> int:
    """How many of the first layers are computed again in the backward pass."""
    recompute = environment.config.recompute
    if recompute.recompute_granularity == "none":
        return 0
    return min(recompute.recompute_num_layers or num_layers, num_layers)
