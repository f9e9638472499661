"""ModernBERT (Warner et al., 2024): embedding with a norm, pre-norm layers with rotary positions, masked-word head.

Shapes: B batch, S sequence, H hidden, V vocabulary (this rank's ids under tensor parallelism).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.nn.activations import activate
from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_core.nn.dropout import Dropout
from mt_core.nn.layout import normal
from mt_core.nn.norm import Norm, build_norm
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import Stage
from mt_models.bert.model import BertModel, BertOutput
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.decoder import TokenEmbedding
from mt_models.blocks.embedding import TiedOutput
from mt_models.blocks.linear import ReplicatedLinear
from mt_models.blocks.norm import BiasFreeLayerNorm
from mt_models.blocks.rotary import FixedRotary, RotaryAngles, RotaryByWindow, inverse_frequencies
from mt_models.blocks.transformer import TransformerLayer, TransformerStack
from mt_models.modernbert.config import ModernBertConfig


def encoder_norm(config: ModernBertConfig, ctx: ParallelContext) -> Norm:
    """LayerNorm over the residual stream, with or without a bias."""
    if config.norm_bias:
        return build_norm("LayerNorm", config.hidden_size, config.norm_epsilon, ctx)
    return BiasFreeLayerNorm(config.hidden_size, config.norm_epsilon, ctx)


class NormedEmbedding(TokenEmbedding):
    """dropout(norm(E[token])): the first layer has no norm of its own before attention."""

    def __init__(self, config: ModernBertConfig, ctx: ParallelContext) -> None:
        super().__init__(config, ctx)
        self.layernorm = encoder_norm(config, ctx)
        self.dropout = Dropout(config.embedding_dropout, ctx)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """[B, S] -> [B, S, H]"""
        return self.dropout(self.layernorm(self.word_embeddings(tokens)))


class ModernBertLayer(TransformerLayer):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); the first layer of the model has no norm before
    attention."""

    def __init__(
        self,
        config: ModernBertConfig,
        core: AttentionCore,
        feed_forward: nn.Module,
        ctx: ParallelContext,
        number: int,
    ) -> None:
        attention = SelfAttention(
            config,
            core,
            ctx,
            window=config.window_of(number),
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
        )
        super().__init__(config, core, feed_forward, ctx, attention)
        self.attention_dropout = Dropout(config.attention_dropout, ctx)
        del self.input_layernorm
        self.input_layernorm: Norm | None = encoder_norm(config, ctx) if number else None  # type: ignore[assignment]
        self.pre_mlp_layernorm = encoder_norm(config, ctx)

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        x, normed = (x, x) if self.input_layernorm is None else self.input_layernorm.add(x)
        attended = self.self_attention(normed, pattern, angles, cache)
        x, normed = self.residual_and_norm(x, attended, self.attention_dropout, self.pre_mlp_layernorm)
        return self.residual(x, self.mlp(normed), self.mlp_dropout)


class PredictionHead(nn.Module):
    """norm(activation(W x + b)), the input of the output layer: [B, S, H] -> the same."""

    def __init__(self, config: ModernBertConfig, ctx: ParallelContext) -> None:
        super().__init__()
        self.activation = config.lm_head_activation
        width, init = config.hidden_size, normal(config.init_method_std)
        self.dense = ReplicatedLinear(width, width, ctx, init=init, bias=config.lm_head_bias, on_sequence=True)
        self.layer_norm = encoder_norm(config, ctx)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_norm(activate(self.activation, self.dense(x)))


class ModernBertModel(BertModel):
    """tokens [B, S] -> BertOutput, without pooled vectors."""

    inputs: tuple[str, ...] = ("tokens", "padding_mask", "position_ids")
    config: Any  # ModernBertConfig

    def __init__(self, config: ModernBertConfig, context: ModelBuildContext) -> None:
        super().__init__(config, context)  # type: ignore[arg-type]
        everywhere, local = (
            FixedRotary(inverse_frequencies(config.head_dim, base))
            for base in (config.rotary_base, config.rotary_base_local)
        )
        self.rotary = RotaryByWindow(everywhere, local)

    def build_embedding(self, context: ModelBuildContext) -> Any:
        if context.has_first:
            return NormedEmbedding(self.config, self.ctx)
        # The last stage's copy of the token embeddings, which are its LM head.
        return TokenEmbedding(self.config, self.ctx) if context.has_last and self.config.add_lm_head else None

    def build_encoder(self, context: ModelBuildContext) -> TransformerStack:
        config, ctx = self.config, self.ctx
        layers = {number: build_layer(config, context, number) for number in context.layers(config.num_layers)}
        return TransformerStack(
            layers, config, ctx, context.recompute, lambda: encoder_norm(config, ctx), has_last=context.has_last
        )

    def build_heads(self, config: Any) -> None:
        if config.add_lm_head:
            self.lm_head = PredictionHead(config, self.ctx)  # type: ignore[assignment]
            self.output_layer = TiedOutput(
                config.vocab_size, self.ctx, bias=config.output_bias, divisible_by=config.make_vocab_size_divisible_by
            )

    def forward(  # type: ignore[override]  # it has no token types
        self, tokens: Tensor, padding_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> BertOutput:
        return self.heads(self.hidden_states(tokens, None, padding_mask, position_ids))

    def run_stage(  # type: ignore[override]
        self,
        stage: Stage,
        hidden: Tensor | None,
        tokens: Tensor,
        padding_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor | BertOutput:
        x = self.states_of_stage(stage, hidden, tokens, None, padding_mask, position_ids)
        return self.heads(x) if stage.last else x

    def states_of_stage(
        self,
        stage: Stage,
        x: Tensor | None,
        tokens: Tensor,
        tokentype_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
        if stage.first:
            assert self.embedding is not None
            x = self.embedding(tokens, position_ids)
        assert x is not None
        # Tokens see tokens, and padding sees padding: within a window a query may have nothing but padding around it,
        # and a softmax over no key at all is no number.
        pattern = AttentionPattern(causal=False, segment_ids=padding_mask)
        encoder: Any = self.encoder
        return encoder(x, pattern, self.rotary.angles(position_ids), stage=stage)

    def encoders(self) -> Mapping[str, nn.Module]:
        return {"model": ModernBertWithoutWords(self)}


class ModernBertWithoutWords(nn.Module):
    """A ModernBERT without its masked-word head: tokens [B, S] -> BertOutput."""

    def __init__(self, model: ModernBertModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, padding_mask: Tensor | None = None) -> BertOutput:
        return self.model.heads(self.model.hidden_states(tokens, None, padding_mask), with_words=False)


def build_layer(config: ModernBertConfig, context: ModelBuildContext, number: int) -> ModernBertLayer:
    """Layer `number`, counted from 0."""
    core = context.attention(
        config.attention_backend,
        num_heads=config.num_attention_heads,
        num_query_groups=config.num_attention_heads,
        head_dim=config.head_dim,
        dropout=config.attention_dropout,
        causal=False,
        window=config.window_of(number),
    )
    return ModernBertLayer(config, core, context.feed_forward("dense", config, number), context.parallel, number)


def build_modernbert(config: ModernBertConfig, context: ModelBuildContext) -> ModernBertModel:
    """See `ModelSpec.build`."""
    return ModernBertModel(config, context)
