"""Hy4: layers on several residual streams, of latent attention over chosen keys and of feed-forwards, dense or with
experts.

    X <- X + post (x) attention(norm(sum of streams))      X <- X + post (x) feed_forward(norm(sum of streams))

The connections are `mt_models.blocks.independent_connection`; streams start as copies of the token's embedding, and are
summed before the final norm.
"""

from __future__ import annotations

from torch import Tensor, nn

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_core.parallel.pipeline.stage import Stage
from mt_models.blocks.decoder import RotaryDecoder, freeze
from mt_models.blocks.hyper_connection import StreamOutput, repeated
from mt_models.blocks.independent_connection import IndependentConnection, added_to_streams, equal_shares, small_scale
from mt_models.blocks.rotary import RotaryAngles
from mt_models.blocks.sparse_latent_attention import Choices
from mt_models.blocks.transformer import block_norm
from mt_models.deepseek_v32.model import check_stages
from mt_models.hy_v4.attention import HyV4Attention
from mt_models.hy_v4.config import HyV4Config


class HyV4Layer(nn.Module):
    """Layer `number`: streams [B, S, n H] -> the same."""

    def __init__(self, config: HyV4Config, context: ModelBuildContext, number: int, choices: Choices) -> None:
        super().__init__()
        ctx = context.parallel
        self.attention_connection = IndependentConnection(config, ctx)
        self.input_layernorm = block_norm(config, ctx)
        self.self_attention = hy_v4_attention(config, context, number, choices)
        self.mlp_connection = IndependentConnection(config, ctx)
        self.pre_mlp_layernorm = block_norm(config, ctx)
        self.mlp = context.feed_forward(config.feed_forward, config.of_layer(number), number)

    def forward(
        self,
        streams: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        x, post = self.attention_connection(streams)
        attended = self.self_attention(self.input_layernorm(x), pattern, angles, cache)
        streams = added_to_streams(attended, post, streams)
        x, post = self.mlp_connection(streams)
        return added_to_streams(self.mlp(self.pre_mlp_layernorm(x)), post, streams)


def hy_v4_attention(config: HyV4Config, context: ModelBuildContext, number: int, choices: Choices) -> HyV4Attention:
    """The attention of layer `number`."""
    core = context.attention(
        config.attention_backend,
        num_heads=config.num_attention_heads,
        num_query_groups=config.num_attention_heads,
        head_dim=config.head_dim,
        dropout=config.attention_dropout,
        # The choice of keys is a bias of zeros and infinities; sequences that are shorter have none.
        bias=context.config.data.seq_length > config.dsa_indexer_topk and not config.dsa_dense_warmup,
        sinks=True,
    )
    remakes = context.recompute.selects("mla_up_proj")
    attention = HyV4Attention(config, core, context.parallel, number, choices, remakes_heads=remakes)
    if attention.core_attention.indexer is not None and attention.loss is None:
        # Nothing would give it a gradient.
        freeze(attention.core_attention.indexer)
    return attention


class HyV4Model(RotaryDecoder):
    """tokens [B, S] -> logits [B, S, vocab]. Between layers and pipeline stages are streams [B, S, n H]."""

    config: HyV4Config

    def __init__(self, config: HyV4Config, context: ModelBuildContext) -> None:
        check_stages(config, context.all_stages or ())
        choices, ctx, streams = Choices(), context.parallel, config.hyper_connection_streams
        super().__init__(
            config,
            context,
            lambda number: HyV4Layer(config, context, number, choices),
            lambda: StreamOutput(
                config, block_norm(config, ctx), ctx, first_bias=equal_shares(streams), first_scale=small_scale
            ),
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
            hidden = repeated(hidden, self.config.hyper_connection_streams)
        return super().through_layers(hidden, tokens, pattern, angles, cache, stage)


def build_hy_v4(config: HyV4Config, context: ModelBuildContext) -> HyV4Model:
    """See `ModelSpec.build`."""
    return HyV4Model(config, context)
