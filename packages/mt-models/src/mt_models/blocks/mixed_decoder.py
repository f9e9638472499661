"""Layers with one block each (Mamba, attention, feed-forward), and a causal decoder of several kinds of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol, cast

from torch import Tensor, nn

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_core.nn.context_parallel.zigzag import check_sequence_length
from mt_core.nn.dropout import Dropout
from mt_core.nn.loss import Unprojected
from mt_core.nn.norm import Norm, Normalization
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.decoder import CausalDecoder, TokenEmbedding
from mt_models.blocks.mamba_mixer import MambaMixer
from mt_models.blocks.rotary import RotaryAngles

# -- layers with one block each: x + block(norm(x)) --------------------------------------------------
#
# All take (x, pattern, angles, cache) and use what they need. x is [batch, sequence, hidden] in the dtype of the
# residual stream; blocks compute in `dtype`, that of the weights. multiplier: of what the block adds. connection: with
# residual streams, where x is [batch, sequence, streams x hidden].


class StreamConnectionLike(Protocol):
    """The connection of a block with residual streams."""

    def __call__(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...
    def mixed(
        self, block_output: Tensor, post: Tensor, mixing: Tensor, streams: Tensor, dropout: Dropout | None = None
    ) -> Tensor: ...


class OneBlockLayer(nn.Module):
    """x + dropout(block(norm(x))), or the connection of the block with residual streams."""

    hyper_connection: nn.Module | None
    drops_in_streams = True
    """Whether each stream has its own dropout of what the block gives."""

    def __init__(self, dropout: Dropout, multiplier: float, connection: nn.Module | None) -> None:
        super().__init__()
        self.dtype, self.multiplier = dropout.ctx.params_dtype, multiplier
        self.dropout = dropout
        self.hyper_connection = connection

    def residual(self, x: Tensor, norm: Norm, block: Callable[[Tensor], Tensor]) -> Tensor:
        """x [B, S, H], or streams [B, S, n H] -> the same"""
        if self.hyper_connection is not None:
            connection = cast(StreamConnectionLike, self.hyper_connection)
            block_input, post, mixing = connection(x)
            output = block(norm(block_input).to(self.dtype))
            if self.drops_in_streams:
                return connection.mixed(output, post, mixing, x, self.dropout)
            return connection.mixed(self.dropout(output), post, mixing, x)
        x, normed = norm.add(x)
        # With fp32_residual_connection x is fp32 and the block's output is added
        # to it in fp32. Otherwise `to` does nothing.
        return x + scaled(self.dropout(block(normed.to(self.dtype))), self.multiplier)


class MambaLayer(OneBlockLayer):
    """x + dropout(mixer(norm(x)))"""

    drops_in_streams = False

    def __init__(
        self,
        mixer: MambaMixer,
        norm: Norm,
        dropout: Dropout,
        multiplier: float = 1.0,
        connection: nn.Module | None = None,
    ) -> None:
        super().__init__(dropout, multiplier, connection)
        self.norm = norm
        self.mixer = mixer

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        return self.residual(x, self.norm, lambda normed: self.mixer(normed, pattern.segment_ids, cache))


class AttentionLayer(OneBlockLayer):
    """x + dropout(self_attention(input_layernorm(x)))"""

    def __init__(
        self,
        attention: SelfAttention,
        norm: Norm,
        dropout: Dropout,
        multiplier: float = 1.0,
        connection: nn.Module | None = None,
    ) -> None:
        super().__init__(dropout, multiplier, connection)
        self.input_layernorm = norm
        self.self_attention = attention

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        return self.residual(
            x, self.input_layernorm, lambda normed: self.self_attention(normed, pattern, angles, cache)
        )


class FeedForwardLayer(OneBlockLayer):
    """x + dropout(mlp(pre_mlp_layernorm(x)))"""

    def __init__(
        self,
        feed_forward: nn.Module,
        norm: Norm,
        dropout: Dropout,
        multiplier: float = 1.0,
        connection: nn.Module | None = None,
    ) -> None:
        super().__init__(dropout, multiplier, connection)
        self.pre_mlp_layernorm = norm
        self.mlp = feed_forward

    def forward(
        self, x: Tensor, pattern: AttentionPattern, angles: RotaryAngles | None = None, cache: Cache | None = None
    ) -> Tensor:
        return self.residual(x, self.pre_mlp_layernorm, self.mlp)


def scaled(x: Tensor, multiplier: float) -> Tensor:
    # Without a product by 1, whose result would be a copy.
    return x if multiplier == 1.0 else x * multiplier


class MixedDecoderConfigLike(Protocol):
    """What the decoder reads from its configuration; its layers declare what they read."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def normalization(self) -> Normalization: ...
    @property
    def norm_epsilon(self) -> float: ...
    @property
    def init_method_std(self) -> float: ...
    @property
    def vocab_size(self) -> int | None: ...
    @property
    def make_vocab_size_divisible_by(self) -> int: ...
    @property
    def untie_embeddings_and_output_weights(self) -> bool: ...
    @property
    def fp32_residual_connection(self) -> bool: ...


class MixedEmbedding(TokenEmbedding):
    """Token embeddings, which start the residual stream: in fp32 if it is configured so."""

    def __init__(self, config: MixedDecoderConfigLike, ctx: ParallelContext) -> None:
        super().__init__(config, ctx)
        self.in_fp32 = config.fp32_residual_connection

    def stream(self, x: Tensor) -> Tensor:
        return x.float() if self.in_fp32 else x

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        return self.stream(super().forward(tokens, position_ids))


class MixedDecoder(CausalDecoder):
    """tokens [B, S] -> logits [B, S, vocab]; a family says how to make layer number i (see residual_layer)."""

    embedding_type: ClassVar[type[MixedEmbedding]] = MixedEmbedding

    def __init__(
        self, config: MixedDecoderConfigLike, context: ModelBuildContext, layer: Callable[[int], nn.Module]
    ) -> None:
        check_sequence_length(context.config.data.seq_length, context.parallel.cp.size)
        # DecoderConfigLike also requires the shape of attention, which only attention reads.
        super().__init__(config, context, self.embedding_type, layer)  # type: ignore[arg-type]
        self.dtype = context.parallel.params_dtype

    def unprojected(self, x: Tensor) -> Unprojected:
        # An fp32 residual stream ends here: the LM head multiplies in the dtype of its weights.
        return super().unprojected(x.to(self.dtype))
