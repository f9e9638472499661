"""DeepSeek-V4: layers on several residual streams, of compressed attention and experts.

    X <- connect(attention(norm(.)), X)      X <- connect(experts(norm(.)), X)

The connections are `mt_models.blocks.hyper_connection`; streams start as copies of the token's embedding, and are
summed before the final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_core.nn.embedding import project_to_vocab
from mt_core.nn.loss import Unprojected
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import Stage
from mt_models.blocks.compressed_attention import CompressedAttention
from mt_models.blocks.decoder import freeze
from mt_models.blocks.hyper_connection import HyperConnection, StreamOutput, repeated
from mt_models.blocks.multi_token import StreamTokenPrediction
from mt_models.blocks.norm import Float32RMSNorm
from mt_models.blocks.predicting_decoder import PredictingDecoder
from mt_models.blocks.rotary import FixedRotary, RotaryAngles, RotaryByWindow, inverse_frequencies, scaled_rotary
from mt_models.deepseek_v4.config import DeepseekV4Config


class DeepseekV4Layer(nn.Module):
    """Layer `number`: streams [B, S, n H] -> the same."""

    def __init__(self, config: DeepseekV4Config, context: ModelBuildContext, number: int) -> None:
        super().__init__()
        ctx = context.parallel
        self.attention_connection = HyperConnection(config, ctx)
        self.input_layernorm = Float32RMSNorm(config.hidden_size, config.norm_epsilon, ctx)
        self.self_attention = CompressedAttention(config, ctx, number)
        if self.self_attention.indexer is not None and self.self_attention.loss is None:
            # Nothing would give it a gradient.
            freeze(self.self_attention.indexer)
        self.mlp_connection = HyperConnection(config, ctx)
        self.pre_mlp_layernorm = Float32RMSNorm(config.hidden_size, config.norm_epsilon, ctx)
        self.mlp = context.feed_forward(config.feed_forward, config, number)

    def forward(
        self,
        streams: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """tokens [B, S]: ids of whole sequences, for layers whose experts go by them."""
        x, post, mixing = self.attention_connection(streams)
        attended = self.self_attention(self.input_layernorm(x), pattern, angles, cache)
        streams = self.attention_connection.mixed(attended, post, mixing, streams)
        x, post, mixing = self.mlp_connection(streams)
        return self.mlp_connection.mixed(self.mlp(self.pre_mlp_layernorm(x), ids=tokens), post, mixing, streams)


class StreamPrediction(StreamTokenPrediction):
    """One depth of multi-token prediction: [B, S, n H] of the depth before -> the streams, and behind them the input of
    the LM head, [B, S, (n + 1) H].

    The layer's streams start as e_proj enorm(embedding) + h_proj hnorm(X_i), and have a head and a norm of their own.
    """

    def __init__(
        self, config: DeepseekV4Config, layer: nn.Module, norm: Callable[[], nn.Module], ctx: ParallelContext
    ) -> None:
        streams = config.hyper_connection_streams
        super().__init__(config, layer, ctx, streams=streams, enorm=norm(), hnorm=norm())
        self.width = streams * config.hidden_size
        self.output = StreamOutput(config, norm(), ctx)

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: Cache | None = None,
    ) -> Tensor:
        streams = super().forward(hidden[..., : self.width], embedded, pattern, angles, cache)
        return torch.cat((streams, self.output(streams)), -1)

    def head_input(self, state: Tensor) -> Tensor:
        return state[..., self.width :]


class DeepseekV4Model(PredictingDecoder):
    """tokens [B, S] -> logits [B, S, vocab]. Between layers and pipeline stages are streams [B, S, n H]."""

    config: DeepseekV4Config
    depth_type = StreamPrediction

    def __init__(self, config: DeepseekV4Config, context: ModelBuildContext) -> None:
        counted, ctx = config.with_predicted_layers(), context.parallel

        def norm() -> Float32RMSNorm:
            return Float32RMSNorm(config.hidden_size, config.norm_epsilon, ctx)

        super().__init__(
            config,
            context,
            lambda number: DeepseekV4Layer(config, context, number),
            lambda depth: DeepseekV4Layer(counted, context, config.num_layers + depth),
            norm,
        )
        # Behind the last layer are streams, of which the head is a part of the output.
        self.decoder.final_layernorm = None
        self.output = StreamOutput(config, norm(), ctx) if context.has_last else None
        compressed = config.model_copy(update={"rotary_base": config.compress_rotary_base})
        in_window = FixedRotary(inverse_frequencies(config.rotary_dim, config.rotary_base))
        self.rotary = RotaryByWindow(scaled_rotary(compressed), in_window)

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

        def call(number: int, layer: nn.Module, x: Tensor) -> Tensor:
            return layer(x, pattern, angles, cache, tokens)

        return self.decoder.through(hidden, call, stage)

    def unprojected(self, x: Tensor) -> Unprojected:
        assert self.output is not None
        return super().unprojected(self.output(x))

    def predicted_logits(self, state: Tensor) -> Tensor:
        # The depth has summed its streams.
        rows = super().unprojected(state)
        return project_to_vocab(rows.hidden, rows.weight, rows.own, rows.ctx)

    def stage_modules(self, stage: Stage) -> Iterator[nn.Module]:
        yield from super().stage_modules(stage)
        if stage.last and self.output is not None:
            yield self.output


def build_deepseek_v4(config: DeepseekV4Config, context: ModelBuildContext) -> DeepseekV4Model:
    """See `ModelSpec.build`."""
    return DeepseekV4Model(config, context)
