"""The T5 model (Raffel et al., 2020): an encoder, and a decoder that attends to it.

Shapes: B batch, S encoder and T decoder positions, H hidden, V vocabulary (this rank's ids under tensor
parallelism). With sequence parallelism hidden states between the layers are divided along S and T.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.embedding import VocabParallelEmbedding, VocabParallelOutput
from mt_core.nn.environment import ModelEnvironment
from mt_core.nn.layout import normal
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.cross_attention import CrossAttentionLayer, DecoderCache, DecoderStack, ScaledQueryAttention
from mt_models.blocks.relative_bias import RelativeBias
from mt_models.blocks.tables import LearnedTable, like_word_vectors
from mt_models.blocks.tied_output import TiedOutput
from mt_models.blocks.transformer import TransformerLayer, TransformerStack
from mt_models.t5.config import T5Config


class T5Embedding(nn.Module):
    """Word vectors, plus learned positions if the model has them, then dropout. Encoder and decoder share it."""

    def __init__(self, config: T5Config, ctx: ParallelContext) -> None:
        super().__init__()
        assert config.vocab_size is not None  # the trainer fills it in from the tokenizer
        self.ctx, self.dropout = ctx, config.hidden_dropout
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            ctx,
            init=normal(config.embedding_init_std),
            divisible_by=config.make_vocab_size_divisible_by,
        )
        self.position_embeddings: LearnedTable | None = None
        if config.max_position_embeddings is not None:
            self.position_embeddings = LearnedTable(
                config.max_position_embeddings, config.hidden_size, normal(config.init_method_std), ctx
            )

    def forward(self, tokens: Tensor, first: int = 0) -> Tensor:
        """[B, S] ids at positions first ... -> [B, S, H]"""
        x = self.word_embeddings(tokens)
        if self.position_embeddings is not None:
            places = torch.arange(first, first + tokens.shape[1], device=tokens.device)[None]
            x = x + like_word_vectors(self.position_embeddings(places), self.ctx)
        return F.dropout(x, self.dropout, self.training)


class T5Model(nn.Module):
    """encoder_tokens [B, S], decoder_tokens [B, T] -> logits [B, T, V]."""

    inputs: ClassVar[tuple[str, ...]] = ("encoder_tokens", "decoder_tokens", "encoder_mask")

    def __init__(self, config: T5Config, environment: ModelEnvironment) -> None:
        super().__init__()
        self.config = config
        self.ctx = environment.parallel
        self.embedding = T5Embedding(config, self.ctx)
        self.encoder_relative_pos_emb = relative_bias(config, self.ctx, bidirectional=True)
        self.encoder = build_encoder(config, environment)
        self.decoder_relative_pos_emb = relative_bias(config, self.ctx, bidirectional=False)
        self.decoder = build_decoder(config, environment)
        self.output_layer = build_output(config, self.ctx)

    def forward(self, encoder_tokens: Tensor, decoder_tokens: Tensor, encoder_mask: Tensor | None = None) -> Tensor:
        """encoder_mask [B, S]: 1 for tokens, 0 for padding (default: all are tokens). Padding at the end of the
        decoder's sequences needs no mask: what stands before does not see it."""
        return self.decode(decoder_tokens, self.encode(encoder_tokens, encoder_mask), encoder_mask)

    def encode(self, encoder_tokens: Tensor, encoder_mask: Tensor | None = None) -> Tensor:
        """[B, S] -> [B, S, H]"""
        length = encoder_tokens.shape[1]
        bias = None if self.encoder_relative_pos_emb is None else self.encoder_relative_pos_emb(length, length)
        pattern = AttentionPattern(causal=False, key_padding=seen(encoder_mask), bias=bias)
        return self._drop(self.encoder(self.embedding(encoder_tokens), pattern))

    def decode(
        self,
        decoder_tokens: Tensor,
        memory: Tensor,
        encoder_mask: Tensor | None = None,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        """Logits [B, T, V] of decoder_tokens [B, T], which stand after the cached ones. memory: of `encode`."""
        return self.logits(self.decoder_states(decoder_tokens, memory, encoder_mask, cache))

    def decoder_states(
        self,
        decoder_tokens: Tensor,
        memory: Tensor,
        encoder_mask: Tensor | None = None,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        """[B, T, H] behind the decoder's last norm."""
        first, new = cache.length if cache else 0, decoder_tokens.shape[1]
        bias = None if self.decoder_relative_pos_emb is None else self.decoder_relative_pos_emb(new, first + new)
        pattern = AttentionPattern(bias=bias)
        memory_pattern = AttentionPattern(causal=False, key_padding=seen(encoder_mask))
        x = self.embedding(decoder_tokens, first)
        return self._drop(self.decoder(x, pattern, memory, memory_pattern, cache))

    def logits(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, V]"""
        if isinstance(self.output_layer, TiedOutput):
            return self.output_layer(x * self.config.output_scale, self.embedding.word_embeddings)
        return self.output_layer(x)

    def new_decoder_cache(self, capacity: int) -> DecoderCache:
        """For `decode`: an empty cache for decoding up to `capacity` positions after one batch of encoder sequences."""
        return DecoderCache(self.config.decoder_layers, capacity)

    @property
    def max_sequence_length(self) -> int | None:
        """Longest sequence of encoder and decoder; None when positions are not a table."""
        return self.config.max_position_embeddings

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.hidden_dropout, self.training)


def seen(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.bool()


def relative_bias(config: T5Config, ctx: ParallelContext, *, bidirectional: bool) -> RelativeBias | None:
    """The bias that all layers of a stack share."""
    if config.position_embedding_type != "relative":
        return None
    return RelativeBias(
        config.relative_attention_num_buckets,
        config.num_attention_heads,
        config.relative_attention_max_distance,
        ctx,
        bidirectional=bidirectional,
        init=normal(config.init_method_std),
    )


def attention_core(config: T5Config, environment: ModelEnvironment, *, causal: bool, bias: bool) -> AttentionCore:
    return environment.attention(
        config.attention_backend,
        num_heads=config.num_attention_heads,
        num_query_groups=config.num_attention_heads,
        head_dim=config.head_dim,
        dropout=config.attention_dropout,
        causal=causal,
        bias=bias,
    )


def build_encoder(config: T5Config, environment: ModelEnvironment) -> TransformerStack:
    ctx, relative = environment.parallel, config.position_embedding_type == "relative"
    core = attention_core(config, environment, causal=False, bias=relative)
    layers = {
        number: TransformerLayer(
            config,
            core,
            environment.feed_forward("dense", config, number),
            ctx,
            ScaledQueryAttention(config, core, ctx, config.query_scale),
        )
        for number in range(config.num_layers)
    }
    return TransformerStack(layers, config, ctx, environment.recompute)


def build_decoder(config: T5Config, environment: ModelEnvironment) -> DecoderStack:
    ctx, relative = environment.parallel, config.position_embedding_type == "relative"
    core = attention_core(config, environment, causal=True, bias=relative)
    cross_core = attention_core(config, environment, causal=False, bias=False)
    layers = [
        CrossAttentionLayer(
            config, core, cross_core, environment.feed_forward("dense", config, number), ctx, config.query_scale
        )
        for number in range(config.decoder_layers)
    ]
    return DecoderStack(layers, config, ctx, environment.recompute)


def build_output(config: T5Config, ctx: ParallelContext) -> TiedOutput | VocabParallelOutput:
    assert config.vocab_size is not None
    multiple = config.make_vocab_size_divisible_by
    if config.untie_embeddings_and_output_weights:
        init = normal(config.init_method_std)
        return VocabParallelOutput(config.vocab_size, config.hidden_size, ctx, init=init, divisible_by=multiple)
    return TiedOutput(config.vocab_size, ctx, bias=config.add_output_bias, divisible_by=multiple)


def build_t5(config: T5Config, environment: ModelEnvironment) -> T5Model:
    return T5Model(config, environment)
