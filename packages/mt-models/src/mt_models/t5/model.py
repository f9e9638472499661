"""The T5 model (Raffel et al., 2020): an encoder, and a decoder that attends to it.

Shapes: B batch, S encoder and T decoder positions, H hidden, V vocabulary (this rank's ids under tensor
parallelism). With sequence parallelism hidden states between the layers are sharded along S and T.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_core.nn.dropout import Dropout
from mt_core.nn.layout import normal
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.cross_attention import CrossAttentionLayer, DecoderStack, ScaledQueryAttention
from mt_models.blocks.embedding import LearnedTable, like_token_embeddings
from mt_models.blocks.encoder_decoder import (
    EncoderDecoderModel,
    SharedEmbedding,
    StageParts,
    attention_core,
    build_output,
)
from mt_models.blocks.position_bias import RelativeBias
from mt_models.blocks.rotary import RotaryAngles
from mt_models.blocks.transformer import TransformerLayer, TransformerStack
from mt_models.t5.config import T5Config


class T5Embedding(SharedEmbedding):
    """Token embeddings, plus learned positions if the model has them. Encoder and decoder share it."""

    def __init__(self, config: T5Config, ctx: ParallelContext) -> None:
        super().__init__(config, ctx, config.embedding_init_std)
        self.ctx = ctx
        self.position_embeddings: LearnedTable | None = None
        if config.max_position_embeddings is not None:
            self.position_embeddings = LearnedTable(
                config.max_position_embeddings, config.hidden_size, normal(config.init_method_std), ctx
            )

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """[B, S] ids at positions [B or 1, S] (default: 0 ...) -> [B, S, H]"""
        x = self.word_embeddings(tokens)
        if self.position_embeddings is not None:
            if position_ids is None:
                position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
            x = x + like_token_embeddings(self.position_embeddings(position_ids), self.ctx)
        return x


class T5Model(EncoderDecoderModel):
    """encoder_tokens [B, S], decoder_tokens [B, T] -> logits [B, T, V]."""

    config: T5Config
    embedding: T5Embedding | None

    def __init__(self, config: T5Config, context: ModelBuildContext) -> None:
        ctx = context.parallel
        super().__init__(config, ctx)
        # Attributes that this process holds nothing of are None: the state dict has no names for them.
        parts = StageParts.of(config, context)
        self.embedding = T5Embedding(config, ctx) if parts.embedding else None
        self.encoder_relative_pos_emb = shared_bias(config, ctx, bidirectional=True) if parts.encoder else None
        self.encoder = build_encoder(config, context, parts)
        self.decoder_relative_pos_emb = shared_bias(config, ctx, bidirectional=False) if parts.decoder else None
        self.decoder = build_decoder(config, context, parts)
        self.output_layer = build_output(config, ctx) if context.has_last else None
        self.encoder_input_dropout = Dropout(config.hidden_dropout, ctx)
        self.encoder_output_dropout = Dropout(config.hidden_dropout, ctx)
        self.decoder_input_dropout = Dropout(config.hidden_dropout, ctx)
        self.decoder_output_dropout = Dropout(config.hidden_dropout, ctx)

    def encoder_input(self, tokens: Tensor) -> Tensor:
        assert self.embedding is not None
        return self.encoder_input_dropout(self.embedding(tokens))

    def decoder_input(self, tokens: Tensor, position_ids: Tensor | None) -> Tensor:
        assert self.embedding is not None
        return self.decoder_input_dropout(self.embedding(tokens, position_ids))

    def encoder_output(self, x: Tensor) -> Tensor:
        return self.encoder_output_dropout(x)

    def decoder_output(self, x: Tensor) -> Tensor:
        return self.decoder_output_dropout(x)


class BiasedAttention(ScaledQueryAttention):
    """Self-attention with a table of biases of its own (UMT5)."""

    def __init__(self, config: T5Config, core: AttentionCore, ctx: ParallelContext, bias: RelativeBias) -> None:
        super().__init__(config, core, ctx, config.query_scale)
        self.relative_pos_emb = bias

    def forward(self, x: Tensor, pattern: AttentionPattern, angles: RotaryAngles | None, cache: Cache | None) -> Tensor:
        # The module itself: it is called with the numbers of queries and keys, which a cache and sequence parallelism
        # make others than those of x.
        biased = replace(pattern, bias=self.relative_pos_emb, _mask=None, _within={})
        return super().forward(x, biased, angles, cache)


def self_attention(config: T5Config, core: AttentionCore, ctx: ParallelContext, *, bidirectional: bool) -> nn.Module:
    """The self-attention of a layer."""
    if not config.relative_attention_bias_per_layer:
        return ScaledQueryAttention(config, core, ctx, config.query_scale)
    return BiasedAttention(config, core, ctx, build_bias(config, ctx, bidirectional=bidirectional))


def shared_bias(config: T5Config, ctx: ParallelContext, *, bidirectional: bool) -> RelativeBias | None:
    """The bias that all layers of a stack share."""
    if config.position_embedding_type != "relative" or config.relative_attention_bias_per_layer:
        return None
    return build_bias(config, ctx, bidirectional=bidirectional)


def build_bias(config: T5Config, ctx: ParallelContext, *, bidirectional: bool) -> RelativeBias:
    return RelativeBias(
        config.relative_attention_num_buckets,
        config.num_attention_heads,
        config.relative_attention_max_distance,
        ctx,
        bidirectional=bidirectional,
        init=normal(config.init_method_std),
    )


def build_encoder(config: T5Config, context: ModelBuildContext, parts: StageParts) -> TransformerStack:
    ctx, relative = context.parallel, config.position_embedding_type == "relative"
    core = attention_core(config, context, causal=False, bias=relative)
    layers = {
        number: TransformerLayer(
            config,
            core,
            context.feed_forward("dense", config, number),
            ctx,
            self_attention(config, core, ctx, bidirectional=True),
        )
        for number in parts.encoder
    }
    return TransformerStack(layers, config, ctx, context.recompute, has_last=parts.encoder_end)


def build_decoder(config: T5Config, context: ModelBuildContext, parts: StageParts) -> DecoderStack:
    ctx, relative = context.parallel, config.position_embedding_type == "relative"
    core = attention_core(config, context, causal=True, bias=relative)
    cross_core = attention_core(config, context, causal=False, bias=False)
    layers = {
        number: CrossAttentionLayer(
            config,
            core,
            cross_core,
            context.feed_forward("dense", config, number),
            ctx,
            config.query_scale,
            self_attention(config, core, ctx, bidirectional=False),
        )
        for number in parts.decoder
    }
    return DecoderStack(layers, config, ctx, context.recompute, has_last=context.has_last)


def build_t5(config: T5Config, context: ModelBuildContext) -> T5Model:
    return T5Model(config, context)
