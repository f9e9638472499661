"""BART (Lewis et al., 2020), mBART (Liu et al., 2020), Blenderbot (Roller et al., 2021).

An encoder and a decoder that share token embeddings, each with a table of learned positions and, but for Blenderbot, a
norm of its embeddings.

Shapes: B batch, S sequence, H hidden, V vocabulary (this rank's ids under tensor parallelism). With sequence
parallelism hidden states between the layers are sharded along S.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.dropout import Dropout
from mt_core.nn.embedding import VocabParallelEmbedding
from mt_core.nn.layout import normal
from mt_core.nn.norm import build_norm
from mt_core.parallel.context import ParallelContext
from mt_models.bart.config import BartConfig
from mt_models.blocks.cross_attention import CrossAttentionLayer, DecoderStack, PostNormCrossAttentionLayer
from mt_models.blocks.embedding import LearnedTable, TiedOutput, like_token_embeddings
from mt_models.blocks.encoder_decoder import EncoderDecoderModel, SharedEmbedding, StageParts, attention_core
from mt_models.blocks.transformer import PostNormLayer, PostNormStack, TransformerLayer, TransformerStack


class StackInput(nn.Module):
    """What the first layer of a stack takes: scaled token embeddings plus positions, normalized, with dropout."""

    def __init__(self, config: BartConfig, ctx: ParallelContext, *, norm_before_positions: bool) -> None:
        super().__init__()
        self.ctx, self.offset = ctx, config.position_offset
        self.norm_before_positions = norm_before_positions
        # transformers does not scale what is normalized next: the norm takes the factor out again, but for its epsilon.
        self.scale = 1.0 if norm_before_positions else config.embedding_scale
        rows, width = config.max_position_embeddings + config.position_offset, config.hidden_size
        self.position_embeddings = LearnedTable(rows, width, normal(config.init_method_std), ctx)
        self.layernorm: nn.Module | None = None
        if config.normalize_embedding:
            self.layernorm = build_norm(config.normalization, width, config.norm_epsilon, ctx)
        self.dropout = Dropout(config.hidden_dropout, ctx)

    def forward(self, tokens: Tensor, words: VocabParallelEmbedding, position_ids: Tensor | None) -> Tensor:
        """[B, S] ids at positions [B or 1, S] (default: 0 ...) -> [B, S, H]"""
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
        positions = like_token_embeddings(self.position_embeddings(position_ids + self.offset), self.ctx)
        x = words(tokens) * self.scale
        if self.norm_before_positions:
            return self.dropout(self.normalized(x) + positions)
        return self.dropout(self.normalized(x + positions))

    def normalized(self, x: Tensor) -> Tensor:
        return x if self.layernorm is None else self.layernorm(x)


class BartModel(EncoderDecoderModel):
    """encoder_tokens [B, S], decoder_tokens [B, T] -> logits [B, T, V]."""

    config: BartConfig

    def __init__(self, config: BartConfig, context: ModelBuildContext) -> None:
        ctx = context.parallel
        super().__init__(config, ctx)
        parts = StageParts.of(config, context)
        self.embedding = SharedEmbedding(config, ctx, config.init_method_std) if parts.embedding else None
        self.encoder_embedding = StackInput(config, ctx, norm_before_positions=False) if parts.encoder_begin else None
        self.encoder_relative_pos_emb = None
        self.encoder = build_encoder(config, context, parts)
        self.decoder_embedding = (
            StackInput(config, ctx, norm_before_positions=config.norm_before_positions) if parts.decoder_begin else None
        )
        self.decoder_relative_pos_emb = None
        self.decoder = build_decoder(config, context, parts)
        self.output_layer = build_output(config, ctx) if context.has_last else None

    def encoder_input(self, tokens: Tensor) -> Tensor:
        assert self.embedding is not None
        assert self.encoder_embedding is not None
        return self.encoder_embedding(tokens, self.embedding.word_embeddings, None)

    def decoder_input(self, tokens: Tensor, position_ids: Tensor | None) -> Tensor:
        assert self.embedding is not None
        assert self.decoder_embedding is not None
        return self.decoder_embedding(tokens, self.embedding.word_embeddings, position_ids)

    def input_modules(self, *, encoder: bool, decoder: bool) -> Iterator[nn.Module]:
        for begins, module in ((encoder, self.encoder_embedding), (decoder, self.decoder_embedding)):
            if begins and module is not None:
                yield module


def build_encoder(
    config: BartConfig, context: ModelBuildContext, parts: StageParts
) -> TransformerStack | PostNormStack:
    ctx, core = context.parallel, attention_core(config, context, causal=False, bias=False)
    layer = PostNormLayer if config.layernorm_placement == "post" else TransformerLayer
    layers = {i: layer(config, core, context.feed_forward("dense", config, i), ctx) for i in parts.encoder}
    if config.layernorm_placement == "post":
        return PostNormStack(layers, context.recompute)
    return TransformerStack(layers, config, ctx, context.recompute, has_last=parts.encoder_end)


def build_decoder(config: BartConfig, context: ModelBuildContext, parts: StageParts) -> DecoderStack:
    ctx, core = context.parallel, attention_core(config, context, causal=True, bias=False)
    cross_core = attention_core(config, context, causal=False, bias=False)
    post = config.layernorm_placement == "post"
    layer = PostNormCrossAttentionLayer if post else CrossAttentionLayer
    layers = {i: layer(config, core, cross_core, context.feed_forward("dense", config, i), ctx) for i in parts.decoder}
    # A post-norm layer ends in a norm, so that the stack has none.
    return DecoderStack(layers, config, ctx, context.recompute, has_last=context.has_last and not post)


def build_output(config: BartConfig, ctx: ParallelContext) -> TiedOutput:
    """Logits by the token embeddings, and a bias for each id that the optimizer leaves as it is: transformers holds it
    as a buffer."""
    assert config.vocab_size is not None
    multiple = config.make_vocab_size_divisible_by
    return TiedOutput(config.vocab_size, ctx, bias=True, divisible_by=multiple, trained=False)


def build_bart(config: BartConfig, context: ModelBuildContext) -> BartModel:
    return BartModel(config, context)
