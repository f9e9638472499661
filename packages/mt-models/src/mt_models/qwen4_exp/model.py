"""Qwen4-Exp's decoder: layers on several residual streams, of gated delta nets or attention to chosen runs, and of
experts.

    X <- X + n-grams(X)      (some layers)
    X <- connect(block, X)      X <- connect(experts, X)

The connections are `mt_models.blocks.gated_streams`, which normalize what a block reads; streams start as copies of the
token's embedding. A layer of multi-token prediction reads the streams behind the last layer, before their mean.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_core.nn.embedding import project_to_vocab
from mt_core.nn.loss import Unprojected
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import Stage
from mt_models.blocks.decoder import RotaryDecoder, attention_core, freeze
from mt_models.blocks.gated_delta_net import GatedDeltaNet
from mt_models.blocks.gated_head_norm import GatedHeadNorm
from mt_models.blocks.gated_streams import StreamConnection, StreamMixer, with_output
from mt_models.blocks.hyper_connection import repeated
from mt_models.blocks.multi_token import StreamTokenPrediction
from mt_models.blocks.ngram_layer import NGramLayer
from mt_models.blocks.norm import ZeroCenteredRMSNorm
from mt_models.blocks.predicting_decoder import PredictsTokens
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
        cache: Cache | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """tokens [B, S]: ids of whole sequences, for layers with n-grams."""
        if self.ngrams is not None:
            assert tokens is not None
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


class StreamPrediction(StreamTokenPrediction):
    """One depth of multi-token prediction: streams [B, S, n H] of the depth before -> the same.

    The layer's streams start as e_proj enorm(embedding) + h_proj hnorm(X)_i, where hnorm is over all n H channels
    together. A mean of its own makes the input of the LM head of them.
    """

    def __init__(
        self, config: Qwen4ExpConfig, layer: nn.Module, norm: Callable[[], nn.Module], ctx: ParallelContext
    ) -> None:
        streams = config.residual_streams
        hnorm = ZeroCenteredRMSNorm(streams * config.hidden_size, config.norm_epsilon, ctx)
        super().__init__(config, layer, ctx, streams=streams, enorm=norm(), hnorm=hnorm)
        self.final_layernorm = StreamMixer(config, ctx)

    def normed(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.hnorm(hidden).unflatten(-1, (self.streams, -1))
        return normed

    def head_input(self, state: Tensor) -> Tensor:
        """Streams [B, S, n H] of the depth -> their mean [B, S, H]."""
        mean: Tensor = self.final_layernorm(state)
        return mean


class Qwen4ExpModel(PredictsTokens, RotaryDecoder):
    """tokens [B, S] -> logits [B, S, vocab]. Between layers and pipeline stages are streams [B, S, n H]."""

    config: Qwen4ExpConfig
    depth_type = StreamPrediction

    def __init__(self, config: Qwen4ExpConfig, context: ModelBuildContext) -> None:
        linear, ctx = config.linear_layers, context.parallel
        RotaryDecoder.__init__(
            self,
            config,
            context,
            lambda number: Qwen4ExpLayer(config, context, number, linear=linear[number]),
            # Behind the last layer: the streams become the input of the LM head, in `unprojected`.
            lambda: StreamMixer(config, ctx),
        )
        counted = config.with_predicted_layers()
        self.add_prediction(
            config,
            context,
            lambda depth: Qwen4ExpLayer(counted, context, config.num_layers + depth, linear=False),
            partial(ZeroCenteredRMSNorm, config.hidden_size, config.norm_epsilon, ctx),
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
        """[B, S, H], or streams [B, S, n H] of the stage before -> streams [B, S, n H]"""
        if stage.first:
            hidden = repeated(hidden, self.config.residual_streams)

        def call(number: int, layer: nn.Module, x: Tensor) -> Tensor:
            return layer(x, pattern, angles, cache, tokens)

        return self.decoder.through_layers(hidden, call, stage)

    def unprojected(self, x: Tensor) -> Unprojected:
        """The input of the LM head for streams [B, S, n H], with its weight."""
        assert self.decoder.final_layernorm is not None
        return super().unprojected(self.decoder.final_layernorm(x))

    def predicted_logits(self, state: Tensor) -> Tensor:
        # The depth has made the mean of its streams.
        rows = super().unprojected(state)
        return project_to_vocab(rows.hidden, rows.weight, rows.own, rows.ctx)


def build_qwen4_exp(config: Qwen4ExpConfig, context: ModelBuildContext) -> Qwen4ExpModel:
    """See `ModelSpec.build`."""
    return Qwen4ExpModel(config, context)
