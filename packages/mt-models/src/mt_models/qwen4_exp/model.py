"""Qwen4-Exp's decoder: layers on several residual streams, of gated delta nets or attention to chosen runs, and of
experts.

    X <- X + n-grams(X)      (some layers)
    X <- connect(block, X)      X <- connect(experts, X)

The connections are `mt_models.blocks.gated_streams`, which normalize what a block reads; streams start as copies of the
token's embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_core.parallel.pipeline.stage import Stage
from mt_models.blocks.decoder import RotaryDecoder, attention_core, freeze
from mt_models.blocks.gated_delta_net import GatedDeltaNet
from mt_models.blocks.gated_head_norm import GatedHeadNorm
from mt_models.blocks.gated_streams import StreamConnection, StreamMixer, with_output
from mt_models.blocks.hyper_connection import repeated
from mt_models.blocks.ngram_layer import NGramLayer
from mt_models.blocks.rotary import RotaryAngles
from mt_models.blocks.run_sparse_attention import RunSparseAttention
from mt_models.qwen4_exp.config import Qwen4ExpConfig


class Qwen4ExpLayer(nn.Module):
    """Layer `number`: streams [B, S, n H] -> the same. linear: it is a gated delta net, else attention."""

    def __init__(self, config: Qwen4ExpConfig, context: ModelBuildContext, number: int, *, linear: bool) -> None:
        super().__init__()
        ctx = context.parallel
        has_ngrams = number in config.layers_with_ngrams
        self.ngrams = NGramLayer(config, ctx, number) if has_ngrams else None
        self.attention_connection = StreamConnection(config, ctx)
        self.self_attention: nn.Module = delta_net(config, context) if linear else sparse_attention(config, context)
        self.mlp_connection = StreamConnection(config, ctx)
        self.mlp = context.feed_forward(config.feed_forward, config, number)

    def forward(
        self,
        streams: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: Cache | None,
        tokens: Tensor,
    ) -> Tensor:
        """tokens [B, S]: ids of whole sequences, for layers with n-grams."""
        if self.ngrams is not None:
            streams = streams + self.ngrams(streams, tokens, pattern.segment_ids, cache)
        x, strengths = self.attention_connection.connect(streams)
        streams = with_output(streams, self.self_attention(x, pattern, angles, cache), strengths)
        x, strengths = self.mlp_connection.connect(streams)
        return with_output(streams, self.mlp(x), strengths)


def delta_net(config: Qwen4ExpConfig, context: ModelBuildContext) -> GatedDeltaNet:
    ctx = context.parallel
    net = GatedDeltaNet(config, ctx)
    if config.linear_output_gate == "sigmoid":
        # In place of the norm with silu that the net has built.
        net.out_norm = GatedHeadNorm(config.linear_value_head_dim, config.norm_epsilon, torch.sigmoid, ctx)
    return net


def sparse_attention(config: Qwen4ExpConfig, context: ModelBuildContext) -> RunSparseAttention:
    attention = RunSparseAttention(config, attention_core(config, context), context.parallel)
    # No gradient passes the choice, and no loss of its own is published.
    freeze(attention.indexer)
    return attention


class Qwen4ExpModel(RotaryDecoder):
    """tokens [B, S] -> logits [B, S, vocab]. Between layers and pipeline stages are streams [B, S, n H]."""

    config: Qwen4ExpConfig

    def __init__(self, config: Qwen4ExpConfig, context: ModelBuildContext) -> None:
        linear = config.linear_layers
        super().__init__(
            config,
            context,
            lambda number: Qwen4ExpLayer(config, context, number, linear=linear[number]),
            # Behind the last layer: the streams become the input of the LM head.
            lambda: StreamMixer(config, context.parallel),
        )

    def through_layers(
        self,
        hidden: Tensor,
        tokens: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: Cache | None,
        stage: Stage,
    ) -> Tensor:
        if stage.first:
            hidden = repeated(hidden, self.config.residual_streams)

        def call(number: int, layer: nn.Module, x: Tensor) -> Tensor:
            return layer(x, pattern, angles, cache, tokens)

        return self.decoder.through(hidden, call, stage)


def build_qwen4_exp(config: Qwen4ExpConfig, context: ModelBuildContext) -> Qwen4ExpModel:
    """See `ModelSpec.build`."""
    return Qwen4ExpModel(config, context)
