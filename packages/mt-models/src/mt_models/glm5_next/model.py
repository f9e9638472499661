"""GLM-5.3-Flash: layers on several residual streams, of Kimi delta attention or of latent attention over chosen
positions, and of feed-forwards, dense or with experts.

    X <- connect(attention(norm(.)), X)      X <- connect(feed_forward(norm(.)), X)

The connections are `mt_models.blocks.hyper_connection`; streams start as copies of the token's embedding, and their
mean is what the final norm reads. A layer of multi-token prediction has one residual stream, and latent attention.
"""

from __future__ import annotations

from torch import Tensor, nn

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_core.nn.layout import zeros
from mt_core.parallel.pipeline.stage import Stage
from mt_models.blocks.decoder import RotaryDecoder, attention_core, freeze
from mt_models.blocks.hyper_connection import HyperConnection, StreamMean, repeated
from mt_models.blocks.kimi_delta_net import KimiDeltaNet
from mt_models.blocks.pooled_latent_attention import PooledLatentAttention
from mt_models.blocks.predicting_decoder import PredictingDecoder
from mt_models.blocks.rotary import RotaryAngles
from mt_models.blocks.transformer import TransformerLayer, block_norm
from mt_models.glm5_next.config import Glm5NextConfig


class Glm5NextLayer(nn.Module):
    """Layer `number`: streams [B, S, n H] -> the same."""

    def __init__(self, config: Glm5NextConfig, context: ModelBuildContext, number: int, *, linear: bool) -> None:
        super().__init__()
        ctx = context.parallel
        self.attention_connection = HyperConnection(config, ctx)
        self.input_layernorm = block_norm(config, ctx)
        self.self_attention = _delta_net(config, context) if linear else _latent_attention(config, context)
        self.mlp_connection = HyperConnection(config, ctx)
        self.pre_mlp_layernorm = block_norm(config, ctx)
        self.mlp = context.feed_forward(config.feed_forward, config, number)

    def forward(
        self,
        streams: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        x, post, mixing = self.attention_connection(streams)
        attended = self.self_attention(self.input_layernorm(x), pattern, angles, cache)
        streams = self.attention_connection.mixed(attended, post, mixing, streams)
        x, post, mixing = self.mlp_connection(streams)
        return self.mlp_connection.mixed(self.mlp(self.pre_mlp_layernorm(x)), post, mixing, streams)


def _delta_net(config: Glm5NextConfig, context: ModelBuildContext) -> nn.Module:
    bound = config.linear_decay_lower_bound
    # Bounded decays start at a rate of 1.
    rates = None if bound is None else zeros
    return KimiDeltaNet(config, context.parallel, lower_bound=bound, fp32_taps=True, initial_rates=rates)


def predicted_layer(config: Glm5NextConfig, context: ModelBuildContext, number: int) -> TransformerLayer:
    """config: with the layers of multi-token prediction counted."""
    feed_forward = context.feed_forward(config.feed_forward, config, number)
    attention = _latent_attention(config, context)
    return TransformerLayer(config, attention_core(config, context), feed_forward, context.parallel, attention)


def _latent_attention(config: Glm5NextConfig, context: ModelBuildContext) -> PooledLatentAttention:
    core: AttentionCore = context.attention(
        config.attention_backend,
        num_heads=config.num_attention_heads,
        num_query_groups=config.num_attention_heads,
        head_dim=config.head_dim,
        dropout=config.attention_dropout,
        # The choice of keys is a bias of zeros and infinities; sequences that are shorter have none.
        bias=context.config.data.seq_length > config.dsa_indexer_topk,
    )
    remakes = context.recompute.selects("mla_up_proj")
    attention = PooledLatentAttention(config, core, context.parallel, remakes_heads=remakes)
    # Nothing would give it a gradient.
    freeze(attention.indexer)
    return attention


class Glm5NextModel(PredictingDecoder):
    """tokens [B, S] -> logits [B, S, vocab]. Between layers and pipeline stages are streams [B, S, n H]."""

    config: Glm5NextConfig

    def __init__(self, config: Glm5NextConfig, context: ModelBuildContext) -> None:
        linear, streams = config.linear_layers, config.hyper_connection_streams
        counted = config.with_predicted_layers() if config.mtp_num_layers else config
        RotaryDecoder.__init__(
            self,
            config,
            context,
            lambda number: Glm5NextLayer(config, context, number, linear=linear[number]),
            lambda: StreamMean(streams, block_norm(config, context.parallel)),
        )
        # The norms of the prediction read one stream.
        self.add_prediction(config, context, lambda depth: predicted_layer(counted, context, config.num_layers + depth))

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
            hidden = repeated(hidden, self.config.hyper_connection_streams)
        return super().through_layers(hidden, tokens, pattern, angles, cache, stage)


def build_glm5_next(config: Glm5NextConfig, context: ModelBuildContext) -> Glm5NextModel:
    """See `ModelSpec.build`."""
    return Glm5NextModel(config, context)
