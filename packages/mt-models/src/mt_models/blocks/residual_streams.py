"""Hyper-connections of Megatron-Core (mHC) around the blocks of a decoder's layers.

The formula is that of `mt_models.blocks.hyper_connection` but for this: products are divided by rms(vec(X)) + eps,
where DeepSeek's are by sqrt(mean of squares + eps); each of the three scales is a parameter; dropout is applied to what
a stream gets of a block. The head behind the last layer adds the epsilon of the norms to its weights.

Names of the parameters are Megatron's; those of the head have a place of their own in its files
(`mt_ckpt.megatron.names`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.errors import ConfigError
from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_core.nn.dropout import Dropout
from mt_core.nn.embedding import project_to_vocab
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.kernels.reference.hyper_connection import Connection, mixed_streams, read_streams
from mt_core.nn.layout import Elementwise, Init, LayoutModule, ParameterLayout, constant, sequence_axes, zeros
from mt_core.nn.loss import Unprojected
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import Stage
from mt_models.blocks.decoder import CausalDecoder
from mt_models.blocks.hyper_connection import HyperHead, repeated
from mt_models.blocks.rotary import RotaryAngles
from mt_models.blocks.transformer import LayerConfigLike, TransformerLayer

EPSILON = 1e-6
"""What is added to the root mean square, to the weights of streams and to Sinkhorn's sums."""


class StreamKeysLike(Protocol):
    """What is read from the configuration of the model."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def norm_epsilon(self) -> float: ...
    @property
    def init_method_std(self) -> float: ...
    @property
    def enable_mhc_connections(self) -> bool: ...
    @property
    def mhc_num_residual_streams(self) -> int: ...
    @property
    def mhc_sinkhorn_iterations(self) -> int: ...
    @property
    def mhc_init_gating_factor(self) -> float: ...


def xavier_uniform(inputs: int, outputs: int) -> Init:
    """Initialization of a matrix from a uniform distribution (Glorot and Bengio, 2010)."""
    bound = math.sqrt(6.0 / (inputs + outputs))
    return Elementwise(lambda tensor, generator: tensor.uniform_(-bound, bound, generator=generator))


class MappingProjection(LayoutModule):
    """vec(X) [..., n H] -> products [..., outputs] in fp32. weight [outputs, n H] in fp32."""

    weight: Tensor

    def __init__(self, inputs: int, outputs: int, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        layout = ParameterLayout(
            (outputs, inputs),
            xavier_uniform(inputs, outputs),
            # Sequence parallelism gives each rank other positions.
            partial_gradient=sequence_axes(ctx),
            dtype=torch.float32,
        )
        self.declare("weight", layout)

    def forward(self, streams: Tensor) -> Tensor:
        # FSDP2 casts parameters to the dtype of the model.
        return F.linear(streams.float(), self.weight.float())


class StreamConnection(LayoutModule):
    """The connection of one block with the residual streams. All parameters are fp32."""

    bias: Tensor
    alpha_pre: Tensor
    alpha_post: Tensor
    alpha_res: Tensor

    def __init__(self, config: StreamKeysLike, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        streams = config.mhc_num_residual_streams
        outputs = (2 + streams) * streams
        self.mapping_proj = MappingProjection(streams * config.hidden_size, outputs, ctx)
        # Sequence parallelism gives each rank other positions.
        partial, scale = sequence_axes(ctx), constant(config.mhc_init_gating_factor)
        for name, size, init in (
            ("alpha_pre", 1, scale),
            ("alpha_post", 1, scale),
            ("alpha_res", 1, scale),
            ("bias", outputs, zeros),
        ):
            self.declare(name, ParameterLayout((size,), init, partial_gradient=partial, dtype=torch.float32))
        self.connection = Connection(EPSILON, EPSILON, config.mhc_sinkhorn_iterations, added_to_root=True)

    def use_kernels(self, kernels: Kernels) -> None:
        """Raises ConfigError for a kernel that adds epsilon to the mean of squares."""
        wanted = kernels.wanted.get("hyper_connection", "auto")
        if wanted not in ("auto", "torch"):
            raise ConfigError(
                f"kernels.hyper_connection={wanted} cannot be used with model.enable_mhc_connections=true: it adds the "
                "epsilon of the norm to the mean of squares, and these connections to its root; it can be auto or torch"
            )

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, n H] -> the block's input [B, S, H], post [B, S, n] and C [B, S, n, n] in fp32"""
        scale = torch.cat((self.alpha_pre, self.alpha_post, self.alpha_res))
        return read_streams(streams, self.mapping_proj(streams), self.bias, scale, self.connection)

    def mixed(
        self, block_output: Tensor, post: Tensor, mixing: Tensor, streams: Tensor, dropout: Dropout | None = None
    ) -> Tensor:
        """dropout(post (x) block_output) + C^T X: [B, S, H], [B, S, n], [B, S, n, n], [B, S, n H] -> [B, S, n H]"""
        if dropout is None or dropout.rate == 0.0 or not dropout.training:
            return mixed_streams(block_output, post, mixing, streams)
        added = (post.to(streams.dtype).unsqueeze(-1) * block_output.unsqueeze(-2)).flatten(-2)
        return dropout(added) + mixed_streams(torch.zeros_like(block_output), post, mixing, streams)


def stream_connection(config: StreamKeysLike, context: ModelBuildContext) -> StreamConnection:
    """The connection of a block, recomputed where `recompute.recompute_modules` has mhc."""
    connection = StreamConnection(config, context.parallel)
    context.recompute.module("mhc", connection)
    return connection


@dataclass(frozen=True)
class _HeadConfig:
    """Constants of the head as `HyperHead` reads them."""

    hidden_size: int
    norm_epsilon: float
    init_method_std: float
    hyper_connection_streams: int
    hyper_connection_epsilon: float


def stream_head(config: StreamKeysLike, ctx: ParallelContext) -> HyperHead:
    """The sum of the streams behind the last layer, with weights that are learned."""
    streams, hidden, epsilon = config.mhc_num_residual_streams, config.hidden_size, config.norm_epsilon
    head = _HeadConfig(hidden, epsilon, config.init_method_std, streams, epsilon)
    return HyperHead(head, ctx, first_weight=xavier_uniform(streams * hidden, streams))


class DecoderOnStreams(CausalDecoder):
    """A decoder whose layers are on several residual streams where the configuration says so.

    Streams [B, S, n H] start as copies of the embedding and are summed in `unprojected`. The constructor of a family
    calls `add_streams`.
    """

    residual_streams = 1
    on_streams = False

    def add_streams(self, config: StreamKeysLike, context: ModelBuildContext) -> None:
        if not config.enable_mhc_connections:
            return
        self.on_streams, self.residual_streams = True, config.mhc_num_residual_streams
        if context.has_last:
            self.decoder.hyper_head = stream_head(config, context.parallel)

    def through_layers(
        self,
        hidden: Tensor,
        tokens: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: Cache | None,
        stage: Stage,
    ) -> Tensor:
        """[B, S, H], or streams [B, S, n H] of the stage before -> streams [B, S, n H]; without streams [B, S, H]"""
        if not self.on_streams:
            return super().through_layers(hidden, tokens, pattern, angles, cache, stage)

        def call(number: int, layer: nn.Module, x: Tensor) -> Tensor:
            return layer(x, pattern, angles, cache)

        return self.decoder.through_layers(
            repeated(hidden, self.residual_streams) if stage.first else hidden, call, stage
        )

    def unprojected(self, x: Tensor) -> Unprojected:
        """The input of the LM head for streams [B, S, n H], with its weight."""
        if not self.on_streams:
            return super().unprojected(x)
        assert self.decoder.hyper_head is not None
        assert self.decoder.final_layernorm is not None
        return super().unprojected(self.decoder.final_layernorm(self.decoder.hyper_head(x)))

    def logits(self, x: Tensor) -> Tensor:
        return self.scaled_logits(super().logits(x))

    def predicted_logits(self, state: Tensor) -> Tensor:
        """See `PredictsTokens`."""
        if not self.on_streams:
            return self.logits(state)
        # A depth has summed its streams.
        rows = super().unprojected(state)
        return self.scaled_logits(project_to_vocab(rows.hidden, rows.weight, rows.own, rows.ctx))

    def scaled_logits(self, logits: Tensor) -> Tensor:
        """Logits [B, S, vocab] as the family scales them."""
        return logits


class ConnectedTransformerLayer(TransformerLayer):
    """X <- connect(attention(norm(.)), X), then X <- connect(feed_forward(norm(.)), X): [B, S, n H] -> the same.

    connections: of attention and of the feed-forward.
    """

    def __init__(
        self,
        config: LayerConfigLike,
        core: AttentionCore,
        feed_forward: nn.Module,
        ctx: ParallelContext,
        attention: nn.Module | None = None,
        *,
        connections: Sequence[StreamConnection],
    ) -> None:
        super().__init__(config, core, feed_forward, ctx, attention)
        self.self_attention_hyper_connection, self.mlp_hyper_connection = connections

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        block_input, post, mixing = self.self_attention_hyper_connection(x)
        attended = self.self_attention(self.input_layernorm(block_input), pattern, angles, cache)
        x = self.self_attention_hyper_connection.mixed(attended, post, mixing, x, self.attention_dropout)
        block_input, post, mixing = self.mlp_hyper_connection(x)
        output = self.mlp(self.pre_mlp_layernorm(block_input))
        return self.mlp_hyper_connection.mixed(output, post, mixing, x, self.mlp_dropout)

    def use_kernels(self, kernels: Kernels) -> None:
        """Nothing: dropout is that of streams, for which there is no kernel."""
