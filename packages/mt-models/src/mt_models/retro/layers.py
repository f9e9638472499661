"""Layers with cross attention between attention and feed-forward, and the encoder of neighbours made of them.

Shapes: B batch, S sequence, L chunks, K neighbours, r tokens of a neighbour, H hidden (see retro.attention).
"""

from __future__ import annotations

from torch import Tensor, nn

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_core.nn.dropout import Dropout
from mt_core.nn.norm import build_norm
from mt_models.blocks.cross_attention import CrossAttention
from mt_models.blocks.rotary import RotaryAngles
from mt_models.blocks.transformer import TransformerLayer
from mt_models.retro.attention import ChunkedCrossAttention, NeighborCrossAttention, Neighbors, TextChunks
from mt_models.retro.config import RetroConfig


class RetroLayer(TransformerLayer):
    """x + attention(norm(x)), x + cross_attention(norm(x), ...), x + feed_forward(norm(x)): three steps."""

    cross_attention: CrossAttention

    def __init__(
        self,
        config: RetroConfig,
        context: ModelBuildContext,
        number: int,
        core: AttentionCore,
        cross_attention: CrossAttention,
    ) -> None:
        ctx = context.parallel
        super().__init__(config, core, context.feed_forward("dense", config, number), ctx)
        self.pre_cross_attn_layernorm = build_norm(config.normalization, config.hidden_size, config.norm_epsilon, ctx)
        self.cross_attention = cross_attention
        self.cross_attention_dropout = Dropout(config.hidden_dropout, ctx)

    # The three steps are methods, since the neighbours are encoded between the first and the second (see RetroDecoder).
    def attend(
        self, x: Tensor, pattern: AttentionPattern, angles: RotaryAngles | None, cache: Cache | None = None
    ) -> Tensor:
        return self.residual(
            x, self.self_attention(self.input_layernorm(x), pattern, angles, cache), self.attention_dropout
        )

    def cross(self, x: Tensor, crossed: Tensor) -> Tensor:
        return self.residual(x, crossed, self.cross_attention_dropout)

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.residual(x, self.mlp(self.pre_mlp_layernorm(x)), self.mlp_dropout)


class RetrievalLayer(RetroLayer):
    """A layer of the decoder that attends to neighbours."""

    def __init__(self, config: RetroConfig, context: ModelBuildContext, number: int) -> None:
        core = self_attention_core(config, context, causal=True)
        cross_core = cross_attention_core(config, context)
        retrieved = config.retro_num_neighbors * config.retrieved_length
        cross_attention = ChunkedCrossAttention(config, cross_core, context.parallel, retrieved)
        super().__init__(config, context, number, core, cross_attention)

    def retrieve(self, x: Tensor, neighbors: Neighbors | None) -> Tensor:
        """[B, S, H] behind attention -> [B, S, H] behind the feed-forward. Without neighbours: a layer of a GPT."""
        if neighbors is not None:
            # Positions without neighbours get 0 from cross_attention, so that x stays as it is there.
            x = self.cross(x, self.cross_attention(self.pre_cross_attn_layernorm(x), neighbors))
        return self.feed_forward(x)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        neighbors: Neighbors | None,
        cache: Cache | None,
    ) -> Tensor:
        return self.retrieve(self.attend(x, pattern, angles, cache), neighbors)


class NeighborLayer(RetroLayer):
    """The layer of the encoder that attends to the text."""

    def __init__(self, config: RetroConfig, context: ModelBuildContext, number: int) -> None:
        core = self_attention_core(config, context, causal=False)
        cross_core = cross_attention_core(config, context)
        cross_attention = NeighborCrossAttention(config, cross_core, context.parallel, config.retro_chunk_length)
        super().__init__(config, context, number, core, cross_attention)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        text: Tensor | TextChunks,
        num_neighbors: int,
    ) -> Tensor:
        x = self.attend(x, pattern, angles)
        normed = self.pre_cross_attn_layernorm(x)
        x = self.cross(x, self.cross_attention(normed, text, num_neighbors))
        return self.feed_forward(x)


class NeighborEncoder(nn.Module):
    """Bidirectional layers over each neighbour; the first attends to the chunk. No final norm, as in Megatron."""

    def __init__(self, config: RetroConfig, context: ModelBuildContext) -> None:
        super().__init__()
        self.recompute = context.recompute
        # On the one process that has the whole model: pipeline parallelism is refused for the family.
        layers: list[nn.Module] = [NeighborLayer(config, context, 0)]
        for number in range(1, config.retro_encoder_num_layers):
            feed_forward = context.feed_forward("dense", config, number)
            core = self_attention_core(config, context, causal=False)
            layers.append(TransformerLayer(config, core, feed_forward, context.parallel))
        self.layers = nn.ModuleList(layers)

    @property
    def text_attention(self) -> NeighborCrossAttention:
        attention = self.layers[0].cross_attention
        assert isinstance(attention, NeighborCrossAttention)
        return attention

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        text: Tensor | TextChunks,
        num_neighbors: int,
    ) -> Tensor:
        """[n K, r, H], text [B, S, H] or its n chunks -> [n K, r, H]"""

        def call(number: int, layer: nn.Module, x: Tensor) -> Tensor:
            # Only layer 0 is a NeighborLayer.
            return layer(x, pattern, angles) if number else layer(x, pattern, angles, text, num_neighbors)

        return self.recompute.run(list(enumerate(self.layers)), x, call)


def self_attention_core(config: RetroConfig, context: ModelBuildContext, *, causal: bool) -> AttentionCore:
    return _core(config, context, causal=causal, groups=config.query_groups)


def cross_attention_core(config: RetroConfig, context: ModelBuildContext) -> AttentionCore:
    """Cross attention has keys and values for each head."""
    return _core(config, context, causal=False, groups=config.num_attention_heads)


def _core(config: RetroConfig, context: ModelBuildContext, *, causal: bool, groups: int) -> AttentionCore:
    return context.attention(
        config.attention_backend,
        num_heads=config.num_attention_heads,
        num_query_groups=groups,
        head_dim=config.head_dim,
        dropout=config.attention_dropout,
        causal=causal,
    )
